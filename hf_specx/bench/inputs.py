"""What is given to `generate` where it is measured, pairs by name and prompts as batches, and what comes out."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.devices import execution_device
from hf_specx.common.errors import require
from hf_specx.common.padding import padded_rows
from hf_specx.pair_files.facts import draft_tokenizer_facts
from hf_specx.pairs.pair import DraftTargetPair

from .grafted import graft
from .recipes import PREFIX, RECIPES, check_grafted


Inputs = dict[str, torch.Tensor]  # input_ids and attention_mask [B, L] int64
LoadPair = Callable[[str, str], DraftTargetPair]


@dataclass
class BenchPair:
    """A pair that is measured.

    Attributes:
        name: as it was asked for.
        target, draft: in evaluation mode.
        facts: what results say of it, plain values.
        tokenizer, prompts: None and () for grafted pairs, which are given random tokens.
        draft_tokenizer: the draft's own; None where it has the target's.
    """

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel
    facts: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase | None = None
    prompts: Sequence[str] = ()
    draft_tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def tokenizers(self) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None:
        """The target's and the draft's, where these are not the same."""
        if self.tokenizer is None or self.draft_tokenizer is None:
            return None
        return self.tokenizer, self.draft_tokenizer

    def inputs(self, batch: int, prompt_tokens: int, new_tokens: int, seed: int) -> Inputs:
        """A batch of prompts that have `prompt_tokens` tokens each.

        Row b has the prompts from number b on, one after another, as far as they are needed.
        """
        _check_room(self.target, prompt_tokens, new_tokens)
        device = execution_device(self.target)
        if self.tokenizer is None:
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(1, self.target.config.vocab_size, (batch, prompt_tokens), generator=generator)
        else:
            rows = [row for text in self.prompts if (row := self.tokenizer(text)["input_ids"])]
            _check_prompts(self.name, rows)
            endless = [
                itertools.chain.from_iterable(itertools.islice(itertools.cycle(rows), b, None)) for b in range(batch)
            ]
            ids = torch.tensor([list(itertools.islice(row, prompt_tokens)) for row in endless])
        return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


LoadBenchPair = Callable[[str, str], BenchPair]


def load_bench_pair(name: str, dtype: str, load: LoadPair) -> BenchPair:
    """A pair by its name.

    Args:
        name: "grafted-30M" and the like, which are made where accelerators are if there are any; else for `load`.
        dtype: "float32", "bfloat16", "float16"; "auto" is as saved, and of grafted pairs what their device is best at.
        load: makes any other pair from its name and dtype.

    Raises:
        ValueError: for a grafted pair that is unknown, and a pair that cannot be measured by the bench.
    """
    check_grafted(name)
    if name.startswith(PREFIX):
        recipe, device = RECIPES[name.removeprefix(PREFIX)], "cuda" if torch.cuda.is_available() else "cpu"
        best = torch.float32 if device == "cpu" else torch.bfloat16
        made = graft(recipe, best if dtype == "auto" else getattr(torch, dtype), device)
        facts: dict[str, Any] = {
            "synthetic": True,
            "epsilon": made.epsilon,
            "alpha": made.alpha,
            "unrelated": recipe.unrelated,
        }
        return BenchPair(name, made.target, made.draft, facts | sizes(made.target, made.draft))
    pair = load(name, dtype)
    require(
        not pair.target.config.is_encoder_decoder,
        f"the pair {name!r} is of encoder-decoders, which the bench does not know; specx generate --demo times them.",
    )
    require(pair.tokenizer is not None, f"the pair {name!r} has no tokenizer, so it cannot read prompts.")
    _check_prompts(name, pair.prompts)
    told = f"the pair {name!r} has no draft model to time; specx bench --only suffix measures drafts without one."
    require(isinstance(pair.draft, PreTrainedModel), told)
    draft = pair.models[-1]
    facts = {"synthetic": False} | sizes(pair.target, draft)
    own = draft_tokenizer_facts(pair.tokenizer, pair.draft_tokenizer, pair.target, draft)
    if own is None:
        return BenchPair(name, pair.target, draft, facts, pair.tokenizer, pair.prompts)
    facts |= {"overlap": own.overlap}
    return BenchPair(name, pair.target, draft, facts, pair.tokenizer, pair.prompts, pair.draft_tokenizer)


def _check_prompts(name: str, prompts: Sequence[object]) -> None:
    require(bool(prompts), f"the pair {name!r} has no prompts of its own; give some with --file.")


def sizes(target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, Any]:
    """The numbers of parameters of both models."""
    return {"target_parameters": target.num_parameters(), "draft_parameters": draft.num_parameters()}


def encode(
    tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel, prompts: list[str], max_new_tokens: int
) -> Inputs:
    """A batch of prompts, where the target takes them.

    They are padded on the left, for an encoder on the right, also where the tokenizer has no pad token.

    Raises:
        ValueError: for a prompt without tokens, or one that leaves no room for `max_new_tokens`.
    """
    device, encodes = execution_device(target), target.config.is_encoder_decoder
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    for number, row in enumerate(rows, 1):
        told = f"prompt {number} is empty, and the tokenizer puts nothing before it; write something."
        require(bool(row), told)
    _check_room(target, max(map(len, rows)), max_new_tokens)
    padded = padded_rows(rows, "right" if encodes else "left", tokenizer)
    return {name: tensor.to(device) for name, tensor in padded.items()}


def _check_room(target: PreTrainedModel, prompt_tokens: int, new_tokens: int) -> None:
    """Whether a model has positions for a prompt and, unless an encoder reads it, for the new tokens after it."""
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    tokens = prompt_tokens if target.config.is_encoder_decoder else prompt_tokens + new_tokens
    require(
        limit is None or tokens <= limit,
        f"{prompt_tokens} prompt tokens and {new_tokens} new ones are more than the {limit} positions of the model; "
        "give fewer new tokens or shorter prompts.",
    )


def prompt_width(target: PreTrainedModel, inputs: Inputs) -> int:
    """Tokens at the start of an output that were not generated: the prompt, or the one that a decoder starts from."""
    return 1 if target.config.is_encoder_decoder else inputs["input_ids"].shape[1]


def emitted(target: PreTrainedModel, inputs: Inputs, output: torch.Tensor, options: dict[str, Any]) -> list[list[int]]:
    """Generated ids of each row of an output [B, L + N], up to and including the first end token.

    `options` are those of the call, since they may have end tokens of their own.
    """
    new = output[:, prompt_width(target, inputs) :]
    end_ids = options.get("eos_token_id", target.generation_config.eos_token_id)
    ends = torch.isin(new, torch.tensor([] if end_ids is None else end_ids, device=new.device, dtype=new.dtype))
    before = ends.cumsum(-1) - ends.int()  # end tokens to the left of each
    return [row[: int(count)] for row, count in zip(new.tolist(), (before == 0).sum(-1), strict=True)]
