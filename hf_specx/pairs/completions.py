"""Prompts to texts: their rows are filled again as they end, or else whole batches are completed."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.errors import is_int, require
from hf_specx.common.padding import padded_rows
from hf_specx.engine.ranks import synced_by_default
from hf_specx.engine.report import SpeculationReport
from hf_specx.engine.requests import Completion, Request, Waiting
from hf_specx.strategy import SpeculativeDecoding
from hf_specx.validation.rows import MAX_SEED

from .progress import Meter
from .results import CompletedText, NumberedText


EMPTY = "is empty, and the tokenizer puts nothing before it"
MAX_PROMPTS = 2**40  # so many seeds are left after the first
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
OF_REQUESTS = ("ordered", "logprobs")


class Pair(Protocol):
    """What `complete` needs of a `DraftTargetPair`."""

    tokenizer: PreTrainedTokenizerBase | None
    report: SpeculationReport | None

    @property
    def target(self) -> PreTrainedModel: ...

    @property
    def models(self) -> list[PreTrainedModel]: ...

    def generate(self, inputs: torch.Tensor | None = None, *more: Any, **kwargs: Any) -> Any: ...

    def strategy_for(self, kwargs: dict[str, Any]) -> SpeculativeDecoding: ...


class Completer:
    """Completes prompts by a pair, each under its own seed.

    Args:
        pair: has a tokenizer.
        batch_size: rows of a batch.
        seed: that of prompt i is `seed + i`.
        options: for `generate`.

    Attributes:
        meter: counts tokens.
        in_batches: whether only whole batches can be completed; `pair.generate` raises what is wrong with the options.
        fits: whether it is known that a short prompt can be completed.

    Raises:
        ValueError: if prompts cannot be completed like this.
    """

    def __init__(self, pair: Pair, batch_size: int, seed: int, options: dict[str, Any]):
        _check(pair, batch_size, seed, options)
        assert pair.tokenizer is not None
        self.pair, self.tokenizer, self.batch_size, self.seed = pair, pair.tokenizer, batch_size, seed
        self.options, self.meter = options, Meter()
        self.in_batches = self.fits = False
        self.reading = False  # the next prompt, whose errors are not ours

    def __call__(self, prompts: Iterable[NumberedText]) -> Iterator[CompletedText]:
        """What becomes of prompts, as soon as it is known; they are taken one by one as there is room for them."""
        prompts, taken = iter(prompts), dict[int, NumberedText]()
        if not self.in_batches:
            yield from self._refilled(prompts, taken)
        if self.in_batches:
            yield from self._batches(itertools.chain(taken.values(), prompts))

    def _refilled(self, prompts: Iterator[NumberedText], taken: dict[int, NumberedText]) -> Iterator[CompletedText]:
        """The same, in rows that are filled again; if the models cannot do this exactly, only `in_batches` is set.

        Args:
            prompts: they are taken from here.
            taken: those that are being completed, by the number of their request.
        """
        options = dict(self.options)
        strategy = self.pair.strategy_for(options)
        strategy.listeners += (self.meter,)
        strategy.report = self.pair.report  # which stays where there is nothing to complete
        requests = self._requests(prompts, taken)
        try:
            self._check_short(options)
            completions = strategy.generate_many(self.pair.target, requests, batch_size=self.batch_size, **options)
            first = list(itertools.islice(completions, 1))
        except ValueError:
            if self.reading:
                raise
            self.in_batches = True
            return
        for done in itertools.chain(first, completions):
            yield self._completed(taken.pop(done.index), done)
        self.pair.report = strategy.report

    def _check_short(self, options: dict[str, Any]) -> None:
        """Raise a ValueError if even a short prompt is refused, before all others are taken and refused as well."""
        if not self.fits:
            options = {"tokenizer": self.tokenizer} | options
            most = options.pop("max_batch_tokens", None)
            waiting = Waiting(self.pair.models, [Request([0], seed=0)], options, most)
            require(waiting.peek() is not None, "no prompt can be completed with these options.")
            self.fits = True

    def _requests(self, prompts: Iterator[NumberedText], taken: dict[int, NumberedText]) -> Iterator[Request]:
        self.reading = True
        for number, prompt in enumerate(prompts):
            self.reading = False
            taken[number] = prompt
            yield Request(self.token_ids(prompt.text), seed=self.seed + prompt.index)
            self.reading = True
        self.reading = False

    def _completed(self, prompt: NumberedText, done: Completion) -> CompletedText:
        if done.error is None:
            text = self.tokenizer.decode(done.tokens, skip_special_tokens=True)
            assert isinstance(text, str)
            return CompletedText(prompt, text, done.finish_reason)
        error = done.error.partition(": ")[2] if self.token_ids(prompt.text) else f"the prompt {EMPTY}"
        return CompletedText(prompt, None, done.finish_reason, error)

    def _batches(self, prompts: Iterator[NumberedText]) -> Iterator[CompletedText]:
        """Whole batches, whose rows wait for the slowest of them."""
        while batch := list(itertools.islice(prompts, self.batch_size)):
            full = [prompt for prompt in batch if self.token_ids(prompt.text)]
            yield from (
                CompletedText(prompt, None, "refused", f"the prompt {EMPTY}") for prompt in batch if prompt not in full
            )
            for prompt, text in zip(full, self._batch(full) if full else [], strict=True):
                yield CompletedText(prompt, text, None)

    def _batch(self, prompts: list[NumberedText]) -> list[str]:
        """What is generated for each prompt of one batch."""
        decodes, rows = self.pair.target.config.is_encoder_decoder, [self.token_ids(prompt.text) for prompt in prompts]
        inputs = padded_rows(rows, "right" if decodes else "left", self.tokenizer)
        output = self.pair.generate(**inputs, **self.options, seeds=[self.seed + prompt.index for prompt in prompts])
        report = self.pair.report
        assert report is not None
        self.meter.add(report.emitted, report.drafted, report.accepted)
        new = output[:, 1 if decodes else inputs["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)

    def token_ids(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        return self.tokenizer(text)["input_ids"]


def _check(pair: Pair, batch_size: Any, seed: Any, options: dict[str, Any]) -> None:
    """Whether prompts can be completed, before anything runs."""
    told = f"batch_size={batch_size} is no number of rows; give 1 or more."
    require(is_int(batch_size) and batch_size >= 1, told)
    told = f"seed={seed} is outside of what a torch generator takes; give an int from 0, well below 2**63."
    require(is_int(seed) and 0 <= seed < MAX_SEED - MAX_PROMPTS, told)
    for name in OF_ONE_CALL:
        told = f"{name}= belongs to one call of generate; leave it out, or call pair.generate for each batch yourself."
        require(name not in options, told)
    for name in OF_REQUESTS:
        told = f"{name}= belongs to strategy.generate_many; leave it out, or call that yourself."
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
