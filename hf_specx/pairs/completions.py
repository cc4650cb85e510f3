"""Prompts to texts, as soon as there is room for each and as soon as it is known."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.errors import is_int, require
from hf_specx.engine.ranks import synced_by_default
from hf_specx.engine.report import SpeculationReport
from hf_specx.engine.requests import Completion, Request, Waiting
from hf_specx.strategy import SpeculativeDecoding
from hf_specx.validation.many import check_many
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

    Raises:
        ValueError: if prompts cannot be completed like this.
    """

    def __init__(self, pair: Pair, batch_size: int, seed: int, options: dict[str, Any]):
        _check(pair, batch_size, seed, options)
        assert pair.tokenizer is not None
        self.pair, self.tokenizer, self.batch_size, self.seed = pair, pair.tokenizer, batch_size, seed
        self.options, self.meter = options, Meter()
        self._check_short()

    def __call__(self, prompts: Iterable[NumberedText]) -> Iterator[CompletedText]:
        """What becomes of prompts, as soon as it is known; they are taken one by one as there is room for them."""
        options, taken = dict(self.options), dict[int, NumberedText]()
        strategy = self.pair.strategy_for(options)
        strategy.listeners += (self.meter,)
        strategy.report = self.pair.report  # which stays where there is nothing to complete
        requests = self._requests(prompts, taken)
        for done in strategy.generate_many(self.pair.target, requests, batch_size=self.batch_size, **options):
            yield self._completed(taken.pop(done.index), done)
        self.pair.report = strategy.report

    def _check_short(self) -> None:
        """Raise a ValueError if even a short prompt is refused, before all others are taken and refused as well."""
        options = dict(self.options)
        self.pair.strategy_for(options)
        most = options.pop("max_batch_tokens", None)
        check_many(self.pair.target, [], self.batch_size, most, None, options)
        waiting = Waiting(self.pair.models, [Request([0], seed=0)], {"tokenizer": self.tokenizer} | options, most)
        if waiting.peek() is None:
            raise ValueError((waiting.refused[0].error or "").removeprefix("request 0: "))

    def _requests(self, prompts: Iterable[NumberedText], taken: dict[int, NumberedText]) -> Iterator[Request]:
        """Requests for prompts, which are noted by the number of their request."""
        for number, prompt in enumerate(prompts):
            taken[number] = prompt
            yield Request(self.token_ids(prompt.text), seed=self.seed + prompt.index)

    def _completed(self, prompt: NumberedText, done: Completion) -> CompletedText:
        if done.error is None:
            text = self.tokenizer.decode(done.tokens, skip_special_tokens=True)
            assert isinstance(text, str)
            return CompletedText(prompt, text, done.finish_reason)
        error = done.error.partition(": ")[2] if self.token_ids(prompt.text) else f"the prompt {EMPTY}"
        return CompletedText(prompt, None, done.finish_reason, error)

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
