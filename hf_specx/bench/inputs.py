"""Prompts as batches for measured calls of `generate`, its settings, and the tokens that it emitted."""

import itertools
import math
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.chats import token_ids
from hf_specx.common.devices import execution_device
from hf_specx.common.errors import require
from hf_specx.common.tokenizers import padded_rows
from hf_specx.common.wrappers import reads_text, vocabulary
from hf_specx.pairs.complete import EMPTY
from hf_specx.pairs.pair import DraftTargetPair


Inputs = dict[str, torch.Tensor]  # input_ids and attention_mask [B, L] int64
MAX_NEW_TOKENS = 128  # where neither the call nor the model says how many


def generation_settings(
    target: PreTrainedModel, options: dict[str, Any], max_new_tokens: int = MAX_NEW_TOKENS
) -> dict[str, Any]:
    """The settings of a call: `options`, and what they leave out as the target's generation config says.

    They have do_sample and max_new_tokens and, if tokens are sampled, temperature, top_p and top_k.
    """
    config, _ = target._prepare_generation_config(None, **options)  # type: ignore[operator]
    settings = {"do_sample": bool(config.do_sample), "max_new_tokens": config.max_new_tokens or max_new_tokens}
    names = ("temperature", "top_p", "top_k") if config.do_sample else ()
    return settings | {name: getattr(config, name) for name in names} | options


def prompts_of_length(
    pair: DraftTargetPair, batch: int, length: int, new_tokens: int, first: int = 0, seed: int = 0
) -> Inputs:
    """A batch of prompts of `length` tokens each, on the device of the target's inputs.

    Row b has the pair's prompts from number `first` + b on, one after another, as far as they are needed. A pair
    without a tokenizer gets random tokens, by the seed.
    """
    _check_room(pair.target, length, new_tokens)
    if pair.tokenizer is None:
        generator = torch.Generator("cpu").manual_seed(seed)
        ids = torch.randint(1, vocabulary(pair.target), (batch, length), generator=generator, device="cpu")
    else:
        tokenized = [token_ids(pair.tokenizer, text) for text in pair.prompts]
        prompts = [tokens for tokens in tokenized if tokens]
        require(bool(prompts), "the pair has no prompts of its own; give some with --prompts.")
        rows = []
        for row in range(first, first + batch):
            rotated = itertools.islice(itertools.cycle(prompts), row % len(prompts), None)
            rows.append(list(itertools.islice(itertools.chain.from_iterable(rotated), length)))
        ids = torch.tensor(rows, device="cpu")
    device = execution_device(pair.target)
    return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


def whole_prompts(pair: DraftTargetPair, rows: int, repeats: int, new_tokens: int) -> list[Inputs]:
    """`repeats` batches of the pair's prompts as they are, each padded to the longest of its own rows."""
    require(
        pair.tokenizer is not None and bool(pair.prompts),
        "prompts as they are need a tokenizer and prompts; give the pair some, or a number of prompt tokens.",
    )
    ids = prompt_rows(pair.tokenizer, pair.target, pair.prompts, new_tokens)  # type: ignore[arg-type]
    return batches_of(pair.target, pair.tokenizer, ids, rows, repeats)


def batches_of(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    ids: list[list[int]],
    rows: int,
    count: int | None = None,
) -> list[Inputs]:
    """`count` batches of prompts, which start again at the end; None is one turn of each prompt."""
    count = math.ceil(len(ids) / rows) if count is None else count
    endless = itertools.cycle(ids)
    return [padded_batch(target, tokenizer, list(itertools.islice(endless, rows))) for _ in range(count)]


def encode(
    tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel, prompts: list[str], max_new_tokens: int
) -> Inputs:
    """A batch of prompts on the device of the target's inputs."""
    return padded_batch(target, tokenizer, prompt_rows(tokenizer, target, prompts, max_new_tokens))


def prompt_rows(
    tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel, prompts: list[str], max_new_tokens: int
) -> list[list[int]]:
    """The tokens of prompts; a ValueError for one that is empty, or too long for the target."""
    rows = [token_ids(tokenizer, prompt) for prompt in prompts]
    for number, row in enumerate(rows, 1):
        require(bool(row), f"prompt {number} {EMPTY}; write something.")
    _check_room(target, max(map(len, rows)), max_new_tokens)
    return rows


def padded_batch(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, rows: list[list[int]]) -> Inputs:
    """Token ids as a batch on the device of the target's inputs: padded on the left, for an encoder on the right."""
    padded = padded_rows(rows, "right" if target.config.is_encoder_decoder else "left", tokenizer)
    return {name: tensor.to(execution_device(target)) for name, tensor in padded.items()}


def _check_room(target: PreTrainedModel, prompt_tokens: int, new_tokens: int) -> None:
    """Raise ValueError unless a model reads prompts and has positions for them and, without an encoder, new tokens."""
    name, reads = type(target).__name__, target.main_input_name
    require(reads_text(target), f"{name} reads {reads}, and prompts are texts; call its generate in Python.")
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    tokens = prompt_tokens if target.config.is_encoder_decoder else prompt_tokens + new_tokens
    require(
        limit is None or tokens <= limit,
        f"{prompt_tokens} prompt tokens and {new_tokens} new ones are more than the {limit} positions of the model; "
        "give fewer new tokens or shorter prompts.",
    )


def prompt_width(target: PreTrainedModel, inputs: Inputs) -> int:
    """The number of tokens at the start of an output that were not generated: of the prompt, or a decoder's first."""
    return 1 if target.config.is_encoder_decoder else inputs["input_ids"].shape[1]


def emitted(target: PreTrainedModel, inputs: Inputs, output: torch.Tensor, options: dict[str, Any]) -> list[list[int]]:
    """The generated ids of each row of an output [B, L + N], up to and including the first end token."""
    eos_token_id = options.get("eos_token_id", target.generation_config.eos_token_id)
    if eos_token_id is None:
        eos_token_id = []
    end_ids = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)
    pad: set[int | None] = set()
    if options.get("stop_strings"):  # behind which a row has pads, and no end token
        pad = {options.get("pad_token_id", target.generation_config.pad_token_id)}
    texts = []
    for row in output[:, prompt_width(target, inputs) :].tolist():
        while row and row[-1] in pad:
            row.pop()
        length = next((count for count, token in enumerate(row, 1) if token in end_ids), len(row))
        texts.append(row[:length])
    return texts
