"""Complete many prompts, on one process or several, to a list or to a file that an interrupted call goes on with."""

import warnings
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any, overload

from hf_specx.common.errors import brief, require

from .completions import EMPTY, Completer, Pair
from .fingerprint import arguments_of
from .progress import Progress
from .results import NumberedText
from .results_file import ResultsFile
from .shares import Claims, gathered, processes, turns


@overload
def complete(
    pair: Pair, texts: Iterable[str], *, batch_size: int = 8, seed: int = 0, out: None = None, **options: Any
) -> list[str]: ...


@overload
def complete(
    pair: Pair, texts: Iterable[str], *, batch_size: int = 8, seed: int = 0, out: str | Path, **options: Any
) -> Path: ...


def complete(
    pair: Pair,
    texts: Iterable[str],
    *,
    batch_size: int = 8,
    seed: int = 0,
    out: str | Path | None = None,
    **options: Any,
) -> list[str] | Path:
    """Complete texts; a row that ends makes place for the next one, and each process takes the next when it has room.

    A text depends on its prompt, its index and the options alone (up to rounding, as in any other batch): not on
    `batch_size`, the number of processes, or interruptions. For this "auto" drafts a fixed number of tokens under
    "block" and "token". Models whose rows cannot be filled again take whole batches.

    Several processes, as of `accelerate launch` or `torchrun`, make the same call, each with its own copy of the pair
    (on an accelerator by `device_map="cuda"`, say). Without `out` all get every text; one that has finished waits for
    the others, at most for the timeout of the process group, and an error in one is raised in all. With `out` they
    need not be started together, only on one machine; what a process leaves that dies, or has an error, the others
    complete.

    With `out` each text is in the file as soon as it is known, and nothing is lost when the call is interrupted, even
    by SIGKILL: the same call goes on from there. Prompts are read one by one, and 8 bytes are kept for each. A prompt
    that cannot be completed (an empty one, or one that is too long) has an "error" in its line, and a warning tells
    how many there are; without its line it is tried again.

    Args:
        pair: a `DraftTargetPair` with a tokenizer.
        texts: prompts; the same on every process, and when a file is gone on with (then also more of them).
        batch_size: rows of a batch, 8 unless given.
        seed: prompt i is sampled with the seed `seed + i`, 0 + i unless given. The global generator is neither used
            nor changed.
        out: a file of JSON lines {"index", "prompt_hash", "text", "finish_reason"}; in the order of the prompts once
            it is complete. Beside it `out` + ".arguments" says what it was made with.
        **options: of `generate` and `SpeculativeDecoding`; a processor or criterion of yours needs `stateless = True`.

    Returns:
        Without `out`, what was generated for each text, without special tokens, on every process; else the file.

    Raises:
        ValueError: a prompt has no tokens or can never be completed (without `out`), an option belongs to a single
            call or may keep state, the models are in shards, or the file is of other prompts or options.
        OSError: the file cannot be written; what it holds stays good.
        RuntimeError: another process failed (without `out`).
    """
    _check_texts(texts)
    work = Completer(pair, batch_size, seed, options)
    if out is not None:
        return _to_file(work, texts, ResultsFile(out, arguments_of(pair, seed, options)))
    return _to_list(work, list(texts))


def _to_list(work: Completer, texts: list[str]) -> list[str]:
    """The longest prompts come first, so that those at the end differ less."""
    _check_texts(texts)
    lengths = [len(ids) for ids in work.tokenizer(texts)["input_ids"]] if texts else []
    empty = lengths.index(0) if 0 in lengths else None
    require(empty is None, f"prompt {empty} {EMPTY}; write something.")
    order = sorted(range(len(texts)), key=lambda number: -lengths[number])

    def own_part() -> Iterable[tuple[int, str | None]]:
        prompts = (NumberedText(order[turn], texts[order[turn]]) for turn in turns(len(texts)))
        alone = processes().num_processes == 1
        with Progress(len(texts) if alone else None, 0, work.meter) as progress:
            for number, done in enumerate(work(prompts)):
                require(done.text is not None, f"prompt {done.prompt.index}: {done.error}")
                progress.update(number + 1)
                yield done.prompt.index, done.text

    return [text for _, text in sorted(gathered(own_part))]


def _to_file(work: Completer, texts: Iterable[str], file: ResultsFile) -> Path:
    with file as results:
        total = len(texts) if isinstance(texts, Sized) else None
        claims, refused = Claims(texts, results), 0
        with Progress(total, results.count, work.meter) as progress:
            while claims.left():
                progress.update(results.count)
                for done in work(claims):
                    results.append(done)
                    refused += done.error is not None
                    progress.update(results.count)
        results.finish(claims.count)
    if refused:
        warnings.warn(f"prompts that were refused: {refused}; their lines in {file.path} say why.", stacklevel=3)
    return file.path


def _check_texts(texts: Any) -> None:
    """Whether texts are several, and strings as far as they are at hand."""
    several = isinstance(texts, Iterable) and not isinstance(texts, str | bytes | dict)
    told = f"texts={brief(texts)} is not a list of strings; put a single prompt into a list."
    require(several and (not isinstance(texts, list) or all(isinstance(text, str) for text in texts)), told)
