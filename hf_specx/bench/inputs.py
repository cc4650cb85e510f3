"""What is given to `generate` where it is measured, prompts as batches, and what comes out."""

import itertools
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.devices import execution_device
from hf_specx.common.errors import require
from hf_specx.common.tokenizers import padded_rows
from hf_specx.pairs.pair import DraftTargetPair


Inputs = dict[str, torch.Tensor]  # input_ids and attention_mask [B, L] int64


def prompts_of_length(pair: DraftTargetPair, batch: int, length: int, new_tokens: int, seed: int = 0) -> Inputs:
    """A batch of prompts of `length` tokens each, where the target takes them.

    Row b has the pair's prompts from number b on, one after another, as far as they are needed. A pair without a
    tokenizer gets random tokens, by the seed.

    Raises:
        ValueError: the pair has a tokenizer and no prompts, or the model has no positions for so many tokens.
    """
    _check_room(pair.target, length, new_tokens)
    if pair.tokenizer is None:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, pair.target.config.vocab_size, (batch, length), generator=generator)
    else:
        rows = [row for text in pair.prompts if (row := pair.tokenizer(text)["input_ids"])]
        require(bool(rows), "the pair has no prompts of its own; give some with --file.")
        rotated = [
            itertools.chain.from_iterable(itertools.islice(itertools.cycle(rows), b, None)) for b in range(batch)
        ]
        ids = torch.tensor([list(itertools.islice(tokens, length)) for tokens in rotated])
    device = execution_device(pair.target)
    return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


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
