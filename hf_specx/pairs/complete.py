"""Complete many prompts, on one process or several, to a list or to a file that an interrupted call goes on with."""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_specx.common.chats import chat_text, check_template_options, token_ids
from hf_specx.common.errors import brief, is_int, require
from hf_specx.common.round import Round
from hf_specx.engine.check_arguments import check_generate_many
from hf_specx.engine.check_inputs import MAX_SEED
from hf_specx.engine.entry import setting
from hf_specx.engine.queue import RequestQueue
from hf_specx.engine.ranks import synced_by_default
from hf_specx.engine.requests import Request

from .fingerprint import arguments_of
from .results_file import CompletedText, NumberedText, open_results, prompt_and_fields
from .shares import gathered, processes


EMPTY = "has no tokens: it is empty, or it is no valid Unicode"
MAX_PROMPTS = 2**40  # so many seeds are left after the first
BAR_AFTER = 3  # seconds
LINE_EVERY = 30  # seconds, where there is no terminal for a bar


def complete(
    pair: Any,
    texts: Iterable[str | Sequence[dict[str, Any]] | dict[str, Any]],
    *,
    batch_size: int = 8,
    seed: int = 0,
    out: str | Path | None = None,
    num_return_sequences: int = 1,
    chat_template_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Complete texts, or answer chats; a row that ends makes place for the next one.

    A text depends on its prompt, its index and the options alone (up to rounding, as in any other batch): not on
    `batch_size`, the number of processes, or interruptions. For this "auto" drafts a fixed number of tokens under
    "block" and "token". All processes of a launch by `accelerate launch` or `torchrun` make the same call, and each
    completes a share.

    Args:
        pair: a `DraftTargetPair` with a tokenizer.
        texts: prompts; the same on every process, and when a file is gone on with (then also more of them). One may be
            a list of messages {"role", "content"}, for the tokenizer's chat template; or an object with one of
            these as "prompt", "text" or "messages", whose other fields come back in its line.
        batch_size: rows of a batch, 8 unless given.
        seed: prompt i is sampled with the seed `seed + i`, 0 + i unless given, and not by the global generator.
        out: a file of JSON lines {"index", "prompt_hash", "text", "finish_reason"} that an interrupted call goes on
            with, also one with another number of processes; in the order of the prompts once it is complete.
            `out` + ".arguments" says what it was made with; process i of several fills `out` + ".rank<i>" until then.
        num_return_sequences: texts for each prompt, one after another as in `generate`; each counts as a prompt here.
        chat_template_kwargs: what the chat template reads besides messages, as {"enable_thinking": False} or {"tools":
            [...]}; for prompts that are messages.
        **options: of `generate` and `SpeculativeDecoding`, else as the target's generation config says; a processor or
            criterion of yours needs `stateless = True`, and with `out` an attribute `fingerprint` where its own
            attributes do not say what it does.

    Returns:
        Without `out`, what was generated for each text, without special tokens, on every process; else the file.

    Raises:
        ValueError: a prompt has no tokens or can never be completed (without `out`), an option belongs to a single
            call or may keep state, the models are in shards, or the file is of other prompts or options, or in use by
            another call.
        OSError: the file cannot be written; what it holds stays good.
        RuntimeError: another process failed (without `out`, or before it began).
    """
    _check_texts(texts)
    template_options = {} if chat_template_kwargs is None else chat_template_kwargs
    check_template_options(template_options, f"chat_template_kwargs={brief(chat_template_kwargs)}")
    completer = Completer(pair, batch_size, seed, options)
    copies = num_return_sequences
    require(
        is_int(copies) and copies >= 1,
        f"num_return_sequences={brief(copies)} is not an int of 1 or more; give one.",
    )
    require(
        copies == 1 or bool(setting("do_sample", pair.target, options)),
        f"num_return_sequences={copies} greedy texts would be the same; pass do_sample=True.",
    )
    prompts = _numbered(pair.tokenizer, texts, copies, template_options)
    if out is None:
        return _to_list(completer, list(prompts))
    total = len(texts) * copies if isinstance(texts, Sized) else None
    arguments = options if copies == 1 else options | {"num_return_sequences": copies}
    return _to_file(completer, prompts, total, Path(out), arguments_of(pair, seed, arguments))


def _check_texts(texts: Any) -> None:
    """Raise ValueError unless these are several prompts; each of a list is looked at."""
    prompts = texts if isinstance(texts, list) else []
    is_several = isinstance(texts, Iterable) and not isinstance(texts, str | bytes | dict)
    is_message = any(isinstance(prompt, dict) and {"role", "content"} <= prompt.keys() for prompt in prompts)
    require(
        is_several and not is_message,
        f"texts={brief(texts)} is no list of texts, or of lists of messages; put a single prompt into a list.",
    )
    for index, prompt in enumerate(prompts):
        prompt_and_fields(prompt, f"prompt {index}")


def _numbered(
    tokenizer: Any, prompts: Iterable[Any], count: int, template_options: dict[str, Any]
) -> Iterator[NumberedText]:
    """Prompts as texts with their numbers, each `count` times, one by one; chats in the tokenizer's template."""
    for index, prompt_or_object in enumerate(prompts):
        prompt, fields = prompt_and_fields(prompt_or_object, f"prompt {index}")
        text = prompt if isinstance(prompt, str) else chat_text(tokenizer, prompt, template_options)
        for copy in range(count):
            yield NumberedText(index * count + copy, text, fields)


def _to_list(completer: "Completer", prompts: list[NumberedText]) -> list[str]:
    """The texts of all prompts, of which each process completes a share.

    The longest are completed first, so that the rows of the last batches end at nearly the same time.
    """
    lengths = [len(token_ids(completer.pair.tokenizer, prompt.text)) for prompt in prompts]
    empty = lengths.index(0) if 0 in lengths else None
    require(empty is None, f"prompt {empty} {EMPTY}; write something.")
    longest_first = sorted(prompts, key=lambda prompt: -lengths[prompt.index])

    def complete_share() -> Iterator[tuple[int, str | None]]:
        share = longest_first[processes().process_index :: processes().num_processes]
        with Progress(len(share)) as progress:
            for count, result in enumerate(completer(share, progress), 1):
                require(result.text is not None, f"prompt {result.prompt.index}: {result.error}")
                progress.show(count)
                yield result.prompt.index, result.text

    return [text for _, text in sorted(gathered(complete_share))]


def _to_file(
    completer: "Completer", prompts: Iterable[NumberedText], total: int | None, out: Path, arguments: dict[str, Any]
) -> Path:
    """Complete prompts to a file, and return its path.

    Each process completes the prompts i with i % world_size == rank; the first process then puts them together.
    """
    rank, world_size = processes().process_index, processes().num_processes
    share_size = None if total is None else len(range(rank, total, world_size))
    num_refused = 0
    with open_results(out, arguments, rank, world_size, gathered) as results:
        num_completed = results.count_of_share()
        with Progress(share_size, num_completed) as progress:
            for result in completer(results.missing(prompts), progress):
                results.append(result)
                num_refused += result.error is not None
                num_completed += 1
                progress.show(num_completed)
        if rank == 0:
            results.finish()
    if rank:
        results.wait_for_first()
    if num_refused:
        message = f"prompts that were refused: {num_refused}; their lines in {results.path} say why."
        warnings.warn(message, stacklevel=3)
    return results.path


class Progress(tqdm):
    """A progress bar of `complete` on stderr; where that is no terminal, a line now and then.

    It counts tokens as a listener of a strategy; of several processes the first one shows its share. `total` and
    `num_done` are prompts, of which some may have been done before.
    """

    def __init__(self, total: int | None, num_done: int = 0):
        self.emitted = self.drafted = self.accepted = 0
        line = "{n_fmt} prompts in {elapsed}{postfix}"
        if total is not None:
            line = "{n_fmt} of {total_fmt} prompts in {elapsed}, {remaining} left{postfix}"
        form: dict[str, Any] = {"delay": LINE_EVERY, "mininterval": LINE_EVERY, "bar_format": f"{line}\n"}
        if sys.stderr.isatty():
            form = {"delay": BAR_AFTER, "bar_format": f"{{bar:20}} {line}" if total else line}
        super().__init__(total=total, initial=num_done, disable=os.environ.get("RANK", "0") != "0", **form)

    def observe(self, round_: Round) -> None:
        """Count the tokens of a round."""
        self.emitted += sum(round_.emitted)
        self.drafted += sum(round_.draft.lengths)
        self.accepted += sum(round_.accepted)

    def show(self, num_done: int) -> None:
        """Show that so many prompts are done by now."""
        if self.disable:
            return
        seconds = max(self.format_dict["elapsed"], 1e-9)
        accepted = f", {self.accepted / self.drafted:.0%} of candidates accepted" if self.drafted else ""
        self.set_postfix_str(f"{self.emitted / seconds:.0f} tokens/s{accepted}", refresh=False)
        self.update(num_done - self.n)


class Completer:
    """Completes prompts with a pair: prompt i with the seed `seed + i`, and `options` as arguments of `generate`."""

    def __init__(self, pair: Any, batch_size: int, seed: int, options: dict[str, Any]):
        self.pair, self.batch_size, self.seed, self.options = pair, batch_size, seed, options
        self._check()

    def __call__(self, prompts: Iterable[NumberedText], progress: Progress | None = None) -> Iterator[CompletedText]:
        """Complete prompts; yields each result as soon as it is known. A prompt is taken when a row is free."""
        tokenizer = self.pair.tokenizer
        waiting = dict[int, NumberedText]()  # prompts by the number of their request
        options = dict(self.options)
        strategy = self.pair.strategy_for(options)
        strategy.listeners += () if progress is None else (progress,)
        strategy.report = self.pair.report  # which stays where there is nothing to complete

        def requests() -> Iterator[Request]:
            for number, prompt in enumerate(prompts):
                waiting[number] = prompt
                yield Request(token_ids(tokenizer, prompt.text), seed=self.seed + prompt.index)

        for completion in strategy.generate_many(self.pair.target, requests(), batch_size=self.batch_size, **options):
            prompt = waiting.pop(completion.index)
            text = error = None
            if completion.tokens is not None:
                text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
            elif token_ids(tokenizer, prompt.text):
                error = completion.error
            else:
                error = f"the prompt {EMPTY}"
            yield CompletedText(prompt, text, completion.finish_reason, error)
        self.pair.report = strategy.report

    def _check(self) -> None:
        """Raise ValueError if not even a short prompt can be completed, before all others are read and refused."""
        require(
            is_int(self.seed) and 0 <= self.seed < MAX_SEED - MAX_PROMPTS,
            f"seed={self.seed} is outside of what a torch generator takes; give an int from 0, well below 2**63.",
        )
        require(
            self.pair.tokenizer is not None,
            "the pair has no tokenizer to read texts with; DraftTargetPair(target, draft, tokenizer) gives it one.",
        )
        require(
            not synced_by_default(*self.pair.models),
            "the models are spread over processes (FSDP or ZeRO-3), which must all run the same number of batches; "
            "load a copy of the pair on each process, or call pair.generate with as many rows on each.",
        )
        options = dict(self.options)
        strategy = self.pair.strategy_for(options)
        max_batch_tokens = options.pop("max_batch_tokens", None)
        check_generate_many(self.pair.target, [], self.batch_size, max_batch_tokens, strategy.streamer, options)
        options = {"tokenizer": self.pair.tokenizer} | options
        RequestQueue(self.pair.models, [], options, max_batch_tokens).check_options()
