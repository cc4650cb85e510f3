"""Pairs and prompts of measurements: grafted ones by name, and any other by its id or folder."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.devices import execution_device
from hf_specx.pairs.pair import DraftTargetPair

from .checks_bench import check_decodes, check_grafted, check_prompts, check_room
from .grafted import PREFIX, RECIPES, graft


Load = Callable[[str, str], DraftTargetPair]


@dataclass
class BenchPair:
    """A pair that is measured.

    Attributes:
        name: as it was asked for.
        facts: what results say of it.
        tokenizer, prompts: None and [] for grafted pairs, which are given random tokens.
    """

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel
    facts: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase | None = None
    prompts: list[str] | None = None

    def inputs(self, batch: int, prompt_tokens: int, new_tokens: int, seed: int) -> dict[str, torch.Tensor]:
        """input_ids and attention_mask [B, L] of prompts that have `prompt_tokens` tokens each.

        Row b has the prompts from number b on, one behind another, as far as they are wanted.
        """
        limit = self.target.config.get_text_config().max_position_embeddings
        check_room(self.name, prompt_tokens, new_tokens, limit)
        device = execution_device(self.target)
        if self.tokenizer is None:
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(1, self.target.config.vocab_size, (batch, prompt_tokens), generator=generator)
        else:
            rows = [row for text in self.prompts or [] if (row := self.tokenizer(text)["input_ids"])]
            check_prompts(self.name, self.tokenizer, rows)
            endless = [
                itertools.chain.from_iterable(itertools.islice(itertools.cycle(rows), b, None)) for b in range(batch)
            ]
            ids = torch.tensor([list(itertools.islice(row, prompt_tokens)) for row in endless])
        return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


def load_bench_pair(name: str, dtype: str, prompts: list[str], load: Load) -> BenchPair:
    """A pair by its name.

    Args:
        name: "grafted-30M" and the like, which are made where accelerators are if there are any; else for `load`.
        dtype: "float32", "bfloat16", "float16"; "auto" is as saved, and of grafted pairs what their device is best at.
        prompts: texts in place of the pair's own.
        load: makes any other pair from its name and dtype.

    Raises:
        ValueError: for a grafted pair that is unknown, and a pair that cannot be measured by the bench.
    """
    check_grafted(name, PREFIX, list(RECIPES))
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
    check_decodes(name, pair.target.config.is_encoder_decoder)
    check_prompts(name, pair.tokenizer, prompts or pair.prompts)
    facts = {"synthetic": False} | sizes(pair.target, pair.draft)
    return BenchPair(name, pair.target, pair.draft, facts, pair.tokenizer, prompts or pair.prompts)


def sizes(target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, Any]:
    """Of both models."""
    return {"target_parameters": target.num_parameters(), "draft_parameters": draft.num_parameters()}
