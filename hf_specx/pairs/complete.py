"""Complete many prompts on several processes: each completes its share, and all get every text, in order."""

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


DELAY = 3  # seconds, before a progress bar appears
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
    """What `complete` needs of a `DraftTargetPair`."""

    tokenizer: PreTrainedTokenizerBase | None

    @property
    def target(self) -> PreTrainedModel: ...

    @property
    def models(self) -> list[PreTrainedModel]: ...

    def generate(self, inputs: torch.Tensor | None = None, *more: Any, **kwargs: Any) -> Any: ...


def complete(pair: Pair, texts: Sequence[str], *, batch_size: int = 8, seed: int = 0, **options: Any) -> list[str]:
    """Complete texts in batches, the longest first; under `accelerate launch` each process takes its share of them.

    The result does not depend on the number of processes: neither do the batches, and each prompt has its own seed.
    For the same reason "auto" drafts a fixed number of tokens under "block" and "token". Processes beyond the number
    of batches have nothing to do; a smaller `batch_size` helps. Every process loads its own copy of the pair, on an
    accelerator by `device_map="cuda"`, say. A process that has finished waits for the others, at most for the timeout
    of the process group. An error in one is raised in all, once all have finished; if a process is killed, the
    launcher has to end the others.

    Args:
        pair: a `DraftTargetPair` with a tokenizer.
        texts: prompts; the same on every process.
        batch_size: rows of a batch, 8 unless given.
        seed: prompt i is sampled with the seed `seed + i`, 0 + i unless given. The global generator is neither used
            nor changed.
        **options: for each `pair.generate`, such as `max_new_tokens`.

    Returns:
        What was generated for each text, without special tokens, on every process.

    Raises:
        ValueError: a prompt has no tokens, an option belongs to a single call, or the models are in shards.
        RuntimeError: another process failed.
    """
    texts = texts if isinstance(texts, str) else list(texts)
    _check(pair, texts, batch_size, seed, options)
    assert pair.tokenizer is not None
    lengths = [len(ids) for ids in pair.tokenizer(list(texts))["input_ids"]] if texts else []
    empty = lengths.index(0) if 0 in lengths else None
    require(empty is None, f"prompt {empty} is empty, and the tokenizer puts nothing before it; write something.")
    order = sorted(range(len(texts)), key=lambda number: -lengths[number])
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]

    def share(mine: list[list[int]]) -> Iterator[tuple[int, str]]:
        for numbers in tqdm(mine, delay=DELAY, unit="batch", desc="completing"):
            seeds = [seed + number for number in numbers]
            yield from zip(numbers, _batch(pair, [texts[number] for number in numbers], seeds, options), strict=True)

    return [text for _, text in sorted(gathered(share, batches))]


def gathered(work: Callable[[list[Any]], Iterable[Any]], items: list[Any]) -> list[Any]:
    """The results of all processes, each of which does the work on its share of the items.

    Args:
        work: called with a share, gives any number of results.
        items: the same on every process.

    Raises:
        Exception: the process's own error, as it was.
        RuntimeError: another process failed.
    """
    state, done, error = processes(), [], None
    try:
        done = list(work(items[state.process_index :: state.num_processes]))
    except Exception as raised:  # the others wait for this share, so they must be told
        error = raised
    every = gather_object([(done, None if error is None else f"{type(error).__name__}: {error}")])
    if error is not None:
        raise error
    failed = [f"process {number} failed with {message}" for number, (_, message) in enumerate(every) if message]
    if failed:
        raise RuntimeError("; ".join(failed))
    return [item for share, _ in every for item in share]


def processes() -> PartialState:
    """The state of this process among those of `accelerate launch` or `torchrun`; without an accelerator it uses gloo.

    A process group that starts here is destroyed at exit; else the process may abort then (pytorch#190489).
    """
    found = in_group()
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())
    if in_group() and not found:
        atexit.register(state.destroy_process_group)
    return state


def _batch(pair: Pair, texts: list[str], seeds: list[int], options: dict[str, Any]) -> list[str]:
    """What is generated for each prompt of one batch."""
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
        not synced_by_default(*pair.models),
        "the models are spread over processes (FSDP or ZeRO-3), which must all run the same number of batches; load a "
        "copy of the pair on each process, or call pair.generate with as many rows on each.",
    )
