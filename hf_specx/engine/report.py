"""What a call did: counters kept round by round, and ratios computed when they are read."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from hf_specx.common.round import Round
from hf_specx.drafting.drafter import TokenizerMatch
from hf_specx.scheduling.costs import Costs
from hf_specx.scheduling.draft_length import expected_tokens

from .history import RoundCounts, RoundRecord


PLAIN = "plain"  # verification and layout of a call that transformers' own sampler decoded
REPORTED = ["verification", "layout", "layout_reason", "limit_reason", "rows", "rounds", "rounds_per_row"]
REPORTED += ["plain_steps", "compilations", "num_draft_tokens", "mean_draft_tokens", "drafted", "forced", "judged"]
REPORTED += ["accepted", "emitted", "drafted_per_row", "accepted_per_row", "emitted_per_row", "sources"]
REPORTED += ["drafted_per_position", "judged_per_position", "accepted_per_position", "acceptance_rate", "alpha"]
REPORTED += ["mean_acceptance_length", "tokens_per_round", "tokenizer_match", "cost_coefficient"]
REPORTED += ["expected_speedup", "forward_limited_speedup", "seconds"]


@dataclass
class SpeculationReport(RoundCounts):
    """Counters of one call of `generate`; rounds are target forwards that judged candidates.

    Attributes:
        verification: "greedy", "token", "block" or "coupled"; "plain" where transformers' own sampler decoded it.
        layout: how rows shared the batch, "plain" as well; `layout_reason` says why.
        limit_reason: what kept the number of candidates below what was asked for; empty if nothing did.
        history: for each row its rounds in order. One with drafted == 0 is a plain step, as the prompt's is.
        keeps: of the calls of a queue the first round of each row is in `history` and at least so many of the last
            ones; what was between is counted in `older`, by row. None keeps all.
        opened: of a sum of calls, the steps that read the prompts of the later ones.
        overlap: sum over judged candidates of sum_x min(p, q); under greedy, the number of matches.
        seconds: wall time, in all and in each phase; on an accelerator a phase may end before its work.
        laps: seconds of each phase, round by round, in the last call; the first is that of the step after the prompts.
        costs: the strategy's cost table.
        plain_steps: target forwards without candidates, the one that read the prompts among them.
        num_draft_tokens: the most candidates of a round; `mean_draft_tokens` is their mean.
        survival: two sums over rows, rounds and i, of the chance that the first i candidates are all kept, and of the
            chance that the first i - 1 are; see `survival_rate`. Of several drafts, only the model's rounds count.
        compilations: forwards that torch compiled for this call, because their sizes had not occurred before.
        matching: how the draft's tokens became the target's; None if both have the same tokenizer.
        sources: by who proposed, "rounds" of rows, candidates "drafted" and "accepted", before any cut.
    """

    verification: str
    layout: str
    layout_reason: str
    rows: int
    history: list[list[RoundRecord]] = field(default_factory=list)
    overlap: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    laps: dict[str, list[float]] = field(default_factory=dict, repr=False)
    costs: Costs | None = None
    rounds: int = 0
    plain_steps: int = 0
    num_draft_tokens: int = 0
    survival: tuple[float, float] = (0.0, 0.0)
    compilations: int = 0
    matching: TokenizerMatch | None = None
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    limit_reason: str = ""
    keeps: int | None = None
    older: list[Counter[RoundRecord]] = field(default_factory=list, repr=False)
    opened: Counter[RoundRecord] = field(default_factory=Counter, repr=False)

    def __post_init__(self) -> None:
        self.history = [[] for _ in range(self.rows)]
        self.older = [Counter() for _ in range(self.rows)]

    def note_time(self, phase: str, seconds: float) -> None:
        """Add the seconds that a phase of a round took."""
        laps = self.laps.setdefault(phase, [])
        laps.append(seconds)
        if self.keeps is not None and len(laps) > 2 * self.keeps:
            del laps[: self.keeps]
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def observe(self, done: Round) -> None:
        """Count a round; a row that gained nothing was finished before, and has no part in it."""
        drafted, flags = max(done.draft.lengths), done.draft.forced
        steps = None if flags is None and done.draft.free is None else done.draft.steps
        self.rounds += drafted > 0
        self.plain_steps += drafted == 0
        self.num_draft_tokens = max(self.num_draft_tokens, drafted)
        self.overlap += sum(sum(shares[:judged]) for shares, judged in zip(done.overlap, done.judged, strict=True))
        kept, tried = self.survival
        for chances in done.chances:
            kept, tried = kept + sum(chances), tried + sum([1.0, *chances][: len(chances)])
        self.survival = kept, tried
        sources = done.draft.sources
        counts = zip(done.draft.lengths, done.accepted, done.emitted, done.judged, done.gained, strict=True)
        for index, (row, record) in enumerate(zip(done.rows, counts, strict=True)):
            forced = () if flags is None else tuple(i for i, is_forced in enumerate(flags[index]) if is_forced)
            if record[-1]:
                self.history[row].append(RoundRecord(*record, drafted, forced, steps))
                if record[0]:
                    self._count(sources[index], {"rounds": 1, "drafted": record[0], "accepted": record[1]})
                self._let_go(row)

    def note_plain(self, columns: int, emitted: list[int], seconds: float) -> None:
        """Count a call without candidates: its forwards, the tokens of each row [B], and the time that it took."""
        self.plain_steps, self.seconds = columns, {"total": seconds}
        self.history = [[RoundRecord(0, 0, 1, gained=1)] * number for number in emitted]

    def _count(self, source: str, counts: dict[str, int]) -> None:
        known = self.sources.get(source, {})
        self.sources[source] = {name: number + known.get(name, 0) for name, number in counts.items()}

    def finish(self, seconds: float, columns: int) -> None:
        """Complete the counters.

        Args:
            seconds: time of the whole call.
            columns: emitted columns; a row may have run ahead of the text, and what it emitted after these is cut.
        """
        self.seconds["total"] = seconds
        for row, records in enumerate(self.history):
            room = columns
            for i, record in enumerate(records):
                self.history[row][i] = record._replace(emitted=min(record.emitted, room))
                room -= self.history[row][i].emitted

    def __add__(self, other: "SpeculationReport") -> "SpeculationReport":
        """Two calls as one: for each row number the rounds of both, one after another."""
        both = replace(self, rows=max(self.rows, other.rows), overlap=self.overlap + other.overlap)
        nothing: list[RoundRecord] = []
        both.history = [a + b for a, b in zip_longest(self.history, other.history, fillvalue=nothing)]
        both.older = [a + b for a, b in zip_longest(self.older, other.older, fillvalue=Counter[RoundRecord]())]
        for row in range(both.rows):
            both._let_go(row)
        names = self.seconds | other.seconds
        both.seconds = {name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in names}
        again = [rows[1][0] for rows in zip(self.history, other.history, strict=False) if all(rows)]
        both.opened = self.opened + other.opened + Counter(record for record in again if not record.drafted)
        both.laps, both.sources = other.laps, dict(self.sources)
        for source, counts in other.sources.items():
            both._count(source, counts)
        both.rounds += other.rounds
        both.plain_steps += other.plain_steps
        both.survival = self.survival[0] + other.survival[0], self.survival[1] + other.survival[1]
        both.compilations += other.compilations
        both.num_draft_tokens = max(self.num_draft_tokens, other.num_draft_tokens)
        return both

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted, as vLLM counts; not α."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def alpha(self) -> float:
        """α of the paper: the mean of sum_x min(p, q) over judged candidates."""
        return self.overlap / self.judged if self.judged else 0.0

    @property
    def survival_rate(self) -> float:
        """The chance that a candidate is kept if those before it are, estimated at all candidates of all rounds."""
        kept, tried = self.survival
        return kept / tried if tried else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds of rows: tokens that a row could gain in a round, before any cut."""
        rounds = self._judged_rounds.total()
        return 1 + self.accepted / rounds if rounds else 1.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a row gains in a round, before a cut at a stop; in lockstep all gain what the slowest does."""
        rounds = self._judged_rounds.total()
        return self._total(lambda r: r.gained) / rounds if rounds else 1.0

    @property
    def tokenizer_match(self) -> dict[str, Any] | None:
        """`matching` as plain values."""
        return None if self.matching is None else self.matching._asdict()

    @property
    def cost_coefficient(self) -> float | None:
        """c, the time of a draft step over that of a target step at this batch size; None if not measured."""
        return self._costs.cost_coefficient(self.rows) if self._costs else None

    @property
    def expected_speedup(self) -> float | None:
        """Theorem 3.8 at this α and c; None if c was not measured.

        If γ varies, it is the number of tokens that all steps after the prompt are expected to emit, over the number
        of target steps that they should cost. Plain steps count with γ = 0.
        """
        c, steps = self.cost_coefficient, self._steps
        if c is None or not steps:
            return None if c is None else 1.0
        alpha = self.alpha
        expected = sum(n * expected_tokens(alpha, r.drafted) for r, n in steps.items())
        return expected / sum(n * (r.draft_steps * c + 1) for r, n in steps.items())

    @property
    def forward_limited_speedup(self) -> float | None:
        """The speed-up if all steps after the prompt took no more time than their forwards; None if not measured.

        That is the number of tokens that rows gained in them, over the number of plain steps that take as long.
        """
        costs, steps = self._costs, self._steps
        if costs is None or not steps:
            return None if costs is None else 1.0
        draft = costs.draft(self.rows)
        target = {width: costs.target(self.rows, width + 1) for width in {0, *(r.width for r in steps)}}
        taken = sum(n * (target[r.width] + r.draft_steps * draft) for r, n in steps.items())
        return sum(n * r.gained for r, n in steps.items()) * target[0] / taken

    @property
    def _costs(self) -> Costs | None:
        return self.costs if self.costs is not None and self.costs.knows(self.rows) else None

    def to_dict(self) -> dict[str, Any]:
        """Counters and ratios as plain values, by the names in `REPORTED`."""
        return {name: getattr(self, name) for name in REPORTED}

    def __repr__(self) -> str:
        rows, rounds = (f"{n} {name}{'s' * (n != 1)}" for n, name in ((self.rows, "row"), (self.rounds, "round")))
        kept = f"acceptance rate {self.acceptance_rate:.3f}, {self.verification} verification, {self.layout} layout"
        return f"SpeculationReport({self.emitted} new tokens in {rows}, {rounds}, {kept})"

    def __str__(self) -> str:
        forced = f", {self.forced} of {self.drafted} candidates forced" if self.forced else ""
        lines = [
            f"{self.emitted} new tokens in {self.rows} row{'s' * (self.rows != 1)}; target forwards: {self.rounds} "
            f"with up to {self.num_draft_tokens} drafted tokens a row, {self.plain_steps} without; "
            f"{self.verification} verification, {self.layout} layout",
            f"alpha {self.alpha:.3f}, acceptance rate {self.acceptance_rate:.3f}, "
            f"{self.tokens_per_round:.2f} tokens a row and round{forced}",
        ]
        if self.limit_reason:
            lines.append(self.limit_reason)
        if self.matching is not None:
            lines.append(f"another tokenizer, matched by {self.matching.match} ({self.matching.reason})")
        if len(self.sources) > 1:
            told = (f"{name} {n['accepted']} of {n['drafted']}" for name, n in self.sources.items())
            lines.append(f"accepted by source: {', '.join(told)}")
        if self._costs:
            lines.append(
                f"draft step / target step {self.cost_coefficient:.2f}, expected speed-up {self.expected_speedup:.2f} "
                f"(Theorem 3.8), {self.forward_limited_speedup:.2f} limited by the forwards"
            )
        if "total" in self.seconds:
            phases = ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items() if name != "total")
            lines.append(f"{self.seconds['total']:.2f} s ({phases})")
        return "\n".join(lines)
