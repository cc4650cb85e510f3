"""A draft without a model: what followed the last tokens of a row where these stood before."""

from array import array
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from hf_specx.common.batch import Batch
from hf_specx.common.devices import sent
from hf_specx.common.errors import kind, require
from hf_specx.common.round import Draft, Round
from hf_specx.sampling.rules import RejectionRule
from hf_specx.scheduling.costs import RoundTimes
from hf_specx.scheduling.draft_length import HASTE, ON
from hf_specx.scheduling.prior import NOTHING, ForwardSize

from .drafter import Drafter, Reading, no_candidates
from .forced import stands_apart
from .suffix_index import DEPTH
from .suffix_pool import SuffixPool, check_number
from .suffix_rows import Acceptance, Match, Rows


ASSUMED = 0.2  # what one more candidate a row adds to a round, as a part of it, where that is not measured


class SuffixDraft(Drafter):
    """Proposes what followed the longest suffix of a row's text that stood before.

    It is looked for in the row itself, in the other rows of the batch and in a pool of earlier texts. Of several
    continuations the most frequent one is taken. How many candidates a row gets follows the number of tokens that
    match, and how often candidates after such matches were kept so far in all calls with this draft, down to none.
    With `seeds` under "token" or "block" each row is looked for in itself alone, and goes by what was kept of it
    alone, so that it is the same beside any others and after any other calls.

    Where candidates are judged by match ("coupled", the default, and greedy) the text is that of `generate`; under
    "token" and "block" it has the same distribution, as everywhere. Calls in several threads may share it.

    Args:
        max_candidates: of a row and round, at most; `num_draft_tokens` is less or the same where it is given.
        min_match: tokens that must match at least, up to 32; more count as 32.
        pool: each call adds its rows to it at its end.
        max_match: tokens that are compared at most, as `min_match`. A longer match is more often right.

    Raises:
        ValueError: if a number is not an int of 1 or more, or the pool is no `SuffixPool`.

    Example:
        >>> strategy = SpeculativeDecoding(SuffixDraft())
        >>> model.generate(**inputs, max_new_tokens=128, custom_generate=strategy)
    """

    def __init__(
        self,
        max_candidates: int = 16,
        min_match: int = 2,
        pool: SuffixPool | None = None,
        max_match: int = DEPTH,
    ):
        check_number("max_candidates", max_candidates, 1)
        check_number("min_match", min_match, 1)
        if not isinstance(pool, SuffixPool | None):
            raise ValueError(f"pool is {kind(pool)}; give a SuffixPool, or leave it out.")
        self.max_candidates: int = max_candidates
        check_number("max_match", max_match, 1)
        told = f"max_match={max_match} is less than min_match={min_match}; give at least as much."
        require(max_match >= min(min_match, DEPTH), told)
        self.max_match, self.pool = min(max_match, DEPTH), pool
        self.min_match = min(min_match, DEPTH)
        self.acceptance = Acceptance()
        self.calls: WeakKeyDictionary[Batch, SuffixCall] = WeakKeyDictionary()

    def __repr__(self) -> str:
        told = [f"{name}={value}" for name, value in self.options.items()]
        return f"SuffixDraft({', '.join(told if self.pool is None else [*told, f'pool={self.pool!r}'])})"

    @property
    def options(self) -> dict[str, int]:
        """What it was made with, its pool aside."""
        return {name: getattr(self, name) for name in ("max_candidates", "min_match", "max_match")}

    def meet(self, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Check the pool's vocabulary."""
        if self.pool is not None:
            self.pool.meet(vocab_size, tokenizer)

    def read(self, reading: Reading) -> None:
        """Index the prompts."""
        self.calls[reading.batch] = SuffixCall(reading, self)

    def cost(self, batch: Batch) -> Callable[[int], object]:
        """Nothing; but that forwards of the target are timed."""
        return lambda _: None

    def size(self) -> ForwardSize:
        """Nothing."""
        return NOTHING

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Up to `lengths` [R] candidates a row; `Draft.probs` is None."""
        call = self.calls.get(batch)
        if call is None or not any(lengths):
            return no_candidates(batch)
        found = call.find(batch, lengths)
        width = max(len(one.tokens) for one in found)
        if not width:
            return no_candidates(batch)
        tokens = sent([one.tokens + [0] * (width - len(one.tokens)) for one in found], batch.ids.device)
        lengths, chances = [len(one.tokens) for one in found], [one.chances for one in found]
        return Draft(tokens, lengths, None, "suffix", estimate=chances)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Index new prompts, in place of texts that have ended."""
        if batch in self.calls:
            self.calls[batch].admit(batch, rows)

    def observe(self, done: Round) -> None:
        """Take in what each row has emitted, how much of it was foreseen here, and how long the round took."""
        call = self.calls.get(done.batch)
        if call is not None:
            call.observe(done)


class SuffixCall:
    """What one call looks in, and how long its rounds take.

    Args:
        reading: of the call.
        draft: whose acceptance it adds to, and whose pool it adds its rows to.
    """

    def __init__(self, reading: Reading, draft: SuffixDraft):
        self.draft, self.costs = draft, reading.costs
        self.times: RoundTimes | None = None
        self.vocab_size = reading.vocab_size
        texts = {row: self._text(reading.batch, row) for row in reading.batch.rows}
        self.processors = reading.processors
        rule = reading.rule
        self.online = not isinstance(rule, RejectionRule)  # else what is drawn depends on what is proposed
        self.apart = stands_apart(rule)
        if self.apart:
            self.rows = [self._alone(row, text) for row, text in texts.items()]
        else:
            earlier = () if draft.pool is None else draft.pool.indices
            self.rows = [Rows(texts, draft.acceptance, earlier, draft.min_match)] * len(texts)

    def find(self, batch: Batch, lengths: list[int]) -> list[Match]:
        """Candidates for the R rows, as many as are worth a longer round, at most `lengths`."""
        draft, rows = self.draft, batch.rows
        found = [
            self.rows[row].find(row, min(length, draft.max_candidates), draft.max_match)
            for row, length in zip(rows, lengths, strict=True)
        ]
        for row, one in zip(rows, found, strict=True):
            self.rows[row].proposed[row] = one
        if not any(one.tokens for one in found):
            return found
        if self.apart:
            found = [self._cut([one], [1.0])[0] for one in found]
        else:
            left = [max(1, self.processors.room(batch, row)) for row in rows]
            found = self._cut(found, [(number / max(left)) ** HASTE for number in left])
        return found

    def _cut(self, found: list[Match], weights: list[float]) -> list[Match]:
        """Cut to the number of candidates with the most tokens a second; a round takes as long as its longest row.

        None are left where that is hardly more than without any, which more often is noise of the times than a gain.
        """
        tokens = [sum(weights)]
        for depth in range(max(len(one.tokens) for one in found)):
            here = [weight * sum(one.chances[depth : depth + 1]) for one, weight in zip(found, weights, strict=True)]
            tokens.append(tokens[-1] + sum(here))
        times = self._times(len(found), len(tokens))
        rates = [expected / seconds for expected, seconds in zip(tokens, times, strict=False)]
        most = rates.index(max(rates))
        if rates[most] < ON * rates[0]:
            most = 0
        return [Match(one.tokens[:most], one.chances[:most], one.length) for one in found]

    def _times(self, rows: int, count: int) -> list[float]:
        """Of rounds with 0 and more candidates a row, in any unit."""
        if self.times is None and self.costs is not None and self.costs.table and not self.apart:
            self.times = RoundTimes(self.costs, self.online, self.draft.max_candidates)
        return [1 + ASSUMED * number for number in range(count)] if self.times is None else self.times(rows)

    def observe(self, done: Round) -> None:
        """A round is over."""
        for row, tokens in zip(done.rows, done.tokens, strict=True):
            self.rows[row].observe(row, tokens)
        if self.times is not None:
            others = {source for source, length in zip(done.draft.sources, done.draft.lengths, strict=True) if length}
            if others <= {"suffix"}:
                self.times.observe(len(done.rows), done.draft.tokens.shape[1])
            else:
                self.times.skip()
        if done.finished:
            self._finish()

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """New prompts have the places of rows, whose texts go to the pool."""
        if self.times is not None:
            self.times.skip()
        self._learn(rows)
        texts = {row: self._text(batch, row) for row in rows}
        if self.apart:
            for row, text in texts.items():
                self.rows[row] = self._alone(row, text)
        else:
            self.rows[0].replace(texts)

    def _alone(self, row: int, text: array) -> Rows:
        """A row that is looked for in itself alone, whatever was kept in other rows and calls."""
        return Rows({row: text}, Acceptance(), (), self.draft.min_match)

    def _learn(self, rows: Iterable[int]) -> None:
        """Add rows to the pool."""
        if self.draft.pool is not None:
            texts = (self.rows[row].texts[row] for row in rows)
            self.draft.pool.add(*([token for token in text if token >= 0] for text in texts))

    def _text(self, batch: Batch, row: int) -> array:
        text = batch.row(row)
        return array("i", text.where((text >= 0) & (text < self.vocab_size), -1).tolist())

    def _finish(self) -> None:
        if self.times is not None and self.costs is not None:
            self.costs.remember_rounds(self.times)
        self._learn(range(len(self.rows)))
