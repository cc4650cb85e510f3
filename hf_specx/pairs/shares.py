"""Many prompts over processes: each process completes its share, and all of them get the whole, in order."""

import atexit
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env, tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.errors import require
from hf_specx.engine.ranks import in_group, synced_by_default
from hf_specx.validation.rows import MAX_SEED


SECONDS_UNSEEN = 3  # a progress bar appears after these
OF_ONE_CALL = (
    "inputs",
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "seeds",
    "streamer",
    "return_dict_in_generate",
    "num_return_sequences",
)


class Pair(Protocol):
    """What is needed of a `DraftTargetPair`."""

    tokenizer: PreTrainedTokenizerBase | None

    @property
    def target(self) -> PreTrainedModel: ...

    @property
    def draft(self) -> PreTrainedModel: ...

    def generate(self, inputs: torch.Tensor | None = None, *more: Any, **kwargs: Any) -> Any: ...


def complete(pair: Pair, texts: Sequence[str], *, batch_size: int = 8, seed: int = 0, **options: Any) -> list[str]:
    """Complete texts in batches, the longest first; under `accelerate launch` each process takes its share of them.

    The text does not depend on the number of processes: which prompts share a batch does not, and each prompt has a
    seed of its own. Under "block" and "token", "auto" drafts a fixed number for that. With fewer batches than
    processes some have nothing to do; give a smaller `batch_size` then. Every process loads its own copy of the pair,
    on an accelerator by `device_map="cuda"` for example. The first to finish waits for the last, at most as long as
    the process group allows; an error is raised everywhere once all have finished, while a process that is killed
    leaves it to the launcher to end the others.

    Args:
        pair: a `DraftTargetPair` with a tokenizer.
        texts: prompts; the same on every process.
        batch_size: rows of a batch.
        seed: the prompt at place i samples under `seed + i`; what is drawn elsewhere does not matter, nor is it moved.
        **options: for `pair.generate`, of every batch; `max_new_tokens` above all.

    Returns:
        What was generated for each text, without special tokens, on every process.

    Raises:
        ValueError: for a prompt without tokens, and for what the batches of a call cannot share.
        RuntimeError: where another process failed.
    """
    texts = texts if isinstance(texts, str) else list(texts)
    _check(pair, texts, batch_size, seed, options)
    assert pair.tokenizer is not None
    lengths = [len(ids) for ids in pair.tokenizer(list(texts))["input_ids"]] if texts else []
    empty = lengths.index(0) if 0 in lengths else None
    require(empty is None, f"prompt {empty} is empty, and the tokenizer puts nothing before it; write something.")
    order = sorted(range(len(texts)), key=lambda place: -lengths[place])
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]

    def share(mine: list[list[int]]) -> Iterator[tuple[int, str]]:
        for places in tqdm(mine, delay=SECONDS_UNSEEN, unit="batch", desc="completing"):
            seeds = [seed + place for place in places]
            yield from zip(places, _batch(pair, [texts[place] for place in places], seeds, options), strict=True)

    return [text for _, text in sorted(gathered(share, batches))]


def gathered(work: Callable[[list[Any]], Iterable[Any]], items: list[Any]) -> list[Any]:
    """What each process makes of its share of the items, from all of them; an error in one is raised in all."""
    state, done, error = processes(), [], None
    try:
        done = list(work(items[state.process_index :: state.num_processes]))
    except Exception as raised:  # the others must hear of it, or they wait for this share
        error = raised
    every = gather_object([(done, None if error is None else f"{type(error).__name__}: {error}")])
    if error is not None:
        raise error
    failed = [f"process {number} failed with {message}" for number, (_, message) in enumerate(every) if message]
    if failed:
        raise RuntimeError("; ".join(failed))
    return [item for share, _ in every for item in share]


def processes() -> PartialState:
    """This process among those that `accelerate launch` or `torchrun` has started; without an accelerator, by gloo.

    A group that starts here is destroyed before the process ends, which would abort now and then (pytorch#190489).
    """
    found = in_group()
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())
    if in_group() and not found:
        atexit.register(state.destroy_process_group)
    return state


def _batch(pair: Pair, texts: list[str], seeds: list[int], options: dict[str, Any]) -> list[str]:
    """What is generated for the prompts of one batch."""
    assert pair.tokenizer is not None
    decodes = pair.target.config.is_encoder_decoder
    encoded = pair.tokenizer(
        texts, return_tensors="pt", padding=len(texts) > 1, padding_side="right" if decodes else "left"
    )
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    output = pair.generate(**inputs, **options, seeds=seeds)
    new = output if decodes else output[:, inputs["input_ids"].shape[1] :]
    return pair.tokenizer.batch_decode(new, skip_special_tokens=True)


def _check(pair: Pair, texts: Sequence[str], batch_size: int, seed: int, options: dict[str, Any]) -> None:
    """Whether texts can be completed in batches, before anything runs."""
    listed = not isinstance(texts, str) and all(isinstance(text, str) for text in texts)
    require(listed, f"texts={str(texts)[:40]!r} is not a list of strings; put a single prompt into a list.")
    require(batch_size >= 1, f"batch_size={batch_size} is no number of rows; give 1 or more.")
    require(
        seed >= 0 and seed + len(texts) <= MAX_SEED,
        f"seed={seed} is not in the range of generators for {len(texts)} prompts; give an int from 0, well below "
        "2**63.",
    )
    for name in OF_ONE_CALL:
        told = f"{name}= belongs to one call of generate; leave it out, or call pair.generate for each batch yourself."
        require(name not in options, told)
    require(
        pair.tokenizer is not None,
        "the pair has no tokenizer to read texts with; give it one, as DraftTargetPair(target, draft, tokenizer).",
    )
    require(
        not synced_by_default(pair.target, pair.draft),
        "the models are spread over processes (FSDP or ZeRO-3), which must all run the same number of batches; load a "
        "copy of the pair on each process, or call pair.generate with as many rows on each.",
    )
