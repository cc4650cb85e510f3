"""What a call did: counters kept round by round, and ratios computed when they are read."""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import compress, zip_longest
from typing import Any, NamedTuple

from hf_specx.common.round import Round, RoundRecord
from hf_specx.drafting.costs import Costs, expected_tokens


PLAINLY = "plain"  # verification and layout of a call that transformers' own sampler decoded
REPORTED = """
    verification layout layout_reason limit_reason misread_reason tree_reason rows rounds rounds_per_row plain_steps
    compilations
    copied num_draft_tokens mean_draft_tokens drafted nodes accepted_per_rank forced judged accepted emitted
    drafted_per_row accepted_per_row
    emitted_per_row sources drafted_per_position judged_per_position accepted_per_position acceptance_rate alpha
    mean_acceptance_length tokens_per_round tokenizer_match cost_coefficient expected_speedup forward_limited_speedup
    seconds
""".split()  # noqa: SIM905
PER_ROW = ("rounds_per_row", "drafted_per_row", "accepted_per_row", "emitted_per_row")
LARGEST = ("rows", "num_draft_tokens")  # of several calls the larger one, where other numbers are added


class RoundSize(NamedTuple):
    """What decides how long a round takes for a row.

    Attributes:
        drafted: candidates of the row.
        draft_steps: positions for which the draft had to take a step; a head that drafts a block takes one for all.
        max_candidates: of the row that has most.
    """

    drafted: int
    draft_steps: int
    max_candidates: int


@dataclass
class SpeculationReport:
    """Counters of one call of `generate`; rounds are target forwards that judged candidates.

    Attributes:
        verification, layout: "plain" where transformers' own sampler decoded; `layout_reason` says why.
        limit_reason: what kept the number of candidates below what was asked for, if anything did.
        misread_reason: why the files of a head look as if they were misread, and what to do.
        tree_reason: why candidates did not branch though that was asked for.
        plain_steps: target forwards without candidates, the prompts' own among them.
        nodes: all candidates, where they branch; `drafted`, `judged` and counts by position are of first choices.
        accepted_per_rank: accepted candidates by their rank among those that followed the same token.
        forced: candidates that were the only token allowed.
        overlap: sum over judged candidates of sum_x min(p, q); under greedy, the number of matches.
        num_new_tokens: tokens by which rows went on in rounds with candidates, before a cut at a stop.
        drafted_per_position, judged_per_position, accepted_per_position: candidates of first choice by the position
            in the round, before a cut: those that followed first choices alone, of branches none.
        round_sizes: by `RoundSize`, how many rounds of rows there were, without a first one that had no candidates;
            `new_tokens_in_rounds`: by how many tokens rows went on in these.
        num_draft_tokens: the most candidates of a round, one after another; `mean_draft_tokens` is their mean.
        acceptance_sums: two sums over rows, rounds and i: of the probability that the first i candidates are all
            accepted, and that the first i - 1 are; see `conditional_acceptance`. Of several drafts, the model's alone.
        sources: by who proposed, "rounds" of rows, candidates "drafted" and "accepted", before any cut.
        seconds: wall time, in all and in each phase, which on an accelerator may end before its work.
        compilations: forwards that torch compiled anew; `copied`: tokens of prompts that others begin with as well.
        tokenizer_match: a `TokenizerMatch` as plain values, of a draft with another tokenizer.
        history: for each row its rounds in order, or at least the last `max_history`; one with drafted == 0 is a plain
            step.
    """

    verification: str
    layout: str
    layout_reason: str
    rows: int
    limit_reason: str = ""
    misread_reason: str = ""
    tree_reason: str = ""
    rounds: int = 0
    plain_steps: int = 0
    nodes: int = 0
    accepted_per_rank: list[int] = field(default_factory=list)
    forced: int = 0
    overlap: float = 0.0
    num_new_tokens: int = 0
    rounds_per_row: list[int] = field(default_factory=list)
    drafted_per_row: list[int] = field(default_factory=list)
    accepted_per_row: list[int] = field(default_factory=list)
    emitted_per_row: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    judged_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    round_sizes: Counter[RoundSize] = field(default_factory=Counter, repr=False)
    new_tokens_in_rounds: int = 0
    num_draft_tokens: int = 0
    acceptance_sums: tuple[float, float] = (0.0, 0.0)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    compilations: int = 0
    copied: int = 0
    costs: Costs | None = None
    tokenizer_match: dict[str, Any] | None = None
    history: list[list[RoundRecord]] = field(default_factory=list, repr=False)
    max_history: int | None = None

    def __post_init__(self) -> None:
        for name in PER_ROW:
            setattr(self, name, [0] * self.rows)
        self.history = [[] for _ in range(self.rows)]

    def observe(self, round_: Round) -> None:
        """Count a round."""
        self._add_rows(len(round_.batch.row_states) - self.rows)
        longest, max_candidates = max(round_.draft.lengths), max(round_.num_candidates)
        num_steps = round_.draft.steps
        in_chain, judged = round_.accepted_in_chain, round_.judged
        self.rounds += longest > 0
        self.plain_steps += longest == 0
        self.num_draft_tokens = max(self.num_draft_tokens, longest)
        self._count_acceptance(round_)
        for index, (row, record) in enumerate(zip(round_.rows, records_of(round_), strict=True)):
            if record.drafted or self.emitted_per_row[row]:  # else it is the first step, with the prompt
                self.round_sizes[RoundSize(record.drafted, num_steps, max_candidates)] += 1
                self.new_tokens_in_rounds += round_.num_new_tokens[index]
            self._keep(row, record)
            self.emitted_per_row[row] += record.emitted
            if record.drafted:
                self._count_candidates(round_, index, record, in_chain[index], judged[index])

    def _count_acceptance(self, round_: Round) -> None:
        """Add to `acceptance_sums`."""
        accepted_mass, drafted_mass = self.acceptance_sums
        for acceptance in round_.draft_acceptance:
            accepted_mass += sum(acceptance)
            drafted_mass += sum([1.0, *acceptance][: len(acceptance)])
        self.acceptance_sums = accepted_mass, drafted_mass

    def _keep(self, row: int, record: RoundRecord) -> None:
        """Add a record to the history of a row."""
        history = self.history[row]
        history.append(record)
        if self.max_history is not None and len(history) > 2 * self.max_history:
            del history[: self.max_history]

    def _count_candidates(self, round_: Round, index: int, record: RoundRecord, in_chain: int, judged: int) -> None:
        """Count the candidates of a row, by its row index.

        Of its first choices so many were `judged`, and `in_chain` accepted.
        """
        row, drafted, accepted = round_.rows[index], record.drafted, record.accepted
        self.forced += len(record.forced)
        self.nodes += record.nodes
        for rank in record.ranks:
            self.accepted_per_rank += [0] * (1 + rank - len(self.accepted_per_rank))
            self.accepted_per_rank[rank] += 1
        self.num_new_tokens += round_.num_new_tokens[index]
        self.overlap += sum(round_.overlap[index][:judged])
        self.rounds_per_row[row] += 1
        self.drafted_per_row[row] += drafted
        self.accepted_per_row[row] += accepted
        positions = self.drafted_per_position, self.judged_per_position, self.accepted_per_position
        for counts, number in zip(positions, (drafted, judged, in_chain), strict=True):
            counts += [0] * (drafted - len(counts))
            for position in range(number):
                counts[position] += 1
        of_source = self.sources.setdefault(round_.draft.sources[index], {"rounds": 0, "drafted": 0, "accepted": 0})
        for name, number in zip(of_source, (1, record.nodes, accepted), strict=True):
            of_source[name] += number

    def _add_rows(self, more: int) -> None:
        """Count rows that a queue has added."""
        if more <= 0:
            return
        self.rows += more
        for name in PER_ROW:
            getattr(self, name).extend([0] * more)
        self.history += [[] for _ in range(more)]

    def finish(self, seconds: float, columns: int) -> None:
        """Complete the counters after so many seconds; what a row emitted after so many columns is cut off."""
        self.seconds["total"] = seconds
        for row, records in enumerate(self.history):
            beyond = max(0, self.emitted_per_row[row] - columns)
            self.emitted_per_row[row] -= beyond
            last = len(records)
            while beyond:
                last -= 1
                cut = min(beyond, records[last].emitted)
                records[last] = records[last]._replace(emitted=records[last].emitted - cut)
                beyond -= cut

    def __add__(self, other: "SpeculationReport") -> "SpeculationReport":
        """Two calls as one; names are those of the first that was speculated, and reasons that differ are joined."""
        total = copy.copy(other if self.layout == PLAINLY else self)
        total.max_history = other.max_history if self.max_history is None else self.max_history
        for name in (each.name for each in fields(self)):
            first, second = getattr(self, name), getattr(other, name)
            if name.endswith("_reason"):
                setattr(total, name, _joined_reasons(first, second))
            elif name in LARGEST:
                setattr(total, name, max(first, second))
            elif name.endswith(("_per_row", "_per_position", "_per_rank")):
                setattr(total, name, [a + b for a, b in zip_longest(first, second, fillvalue=0)])
            elif isinstance(first, int | float | Counter) and name != "max_history":
                setattr(total, name, first + second)
        total.acceptance_sums = (
            self.acceptance_sums[0] + other.acceptance_sums[0],
            self.acceptance_sums[1] + other.acceptance_sums[1],
        )
        total.seconds = _added(self.seconds, other.seconds)
        names = self.sources | other.sources
        total.sources = {name: _added(self.sources.get(name, {}), other.sources.get(name, {})) for name in names}
        pairs = zip_longest(self.history, other.history, fillvalue=list[RoundRecord]())
        total.history = [(a + b)[None if total.max_history is None else -2 * total.max_history :] for a, b in pairs]
        return total

    @property
    def drafted(self) -> int:
        """Candidates of all rows; of trees, those of first choice."""
        return sum(self.drafted_per_row)

    @property
    def judged(self) -> int:
        """Candidates of first choice whose predecessors were all kept."""
        return sum(self.judged_per_position)

    @property
    def accepted(self) -> int:
        """Candidates that were kept, before a cut at a stop."""
        return sum(self.accepted_per_row)

    @property
    def emitted(self) -> int:
        """Tokens that entered the text, over all rows."""
        return sum(self.emitted_per_row)

    @property
    def mean_draft_tokens(self) -> float:
        """Candidates of a row in a round, over the rounds that had any."""
        rounds = sum(self.rounds_per_row)
        return self.drafted / rounds if rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / nodes, the share of all candidates that was kept, as vLLM counts; not α."""
        return self.accepted / self.nodes if self.nodes else 0.0

    @property
    def alpha(self) -> float:
        """α of the paper: the mean of sum_x min(p, q) over judged candidates."""
        return self.overlap / self.judged if self.judged else 0.0

    @property
    def conditional_acceptance(self) -> float:
        """The probability that a candidate is accepted if those before it are, by all candidates of all rounds."""
        return self.acceptance_sums[0] / self.acceptance_sums[1] if self.acceptance_sums[1] else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds of rows: tokens that a row could gain in a round, before any cut."""
        rounds = sum(self.rounds_per_row)
        return 1 + self.accepted / rounds if rounds else 1.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a row gains in a round, before a cut at a stop; in lockstep all gain what the slowest does."""
        rounds = sum(self.rounds_per_row)
        return self.num_new_tokens / rounds if rounds else 1.0

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
        c, alpha = self.cost_coefficient, self.alpha
        if c is None or not self.round_sizes:
            return None if c is None else 1.0
        num_steps = self._costs.num_steps  # type: ignore[union-attr]
        expected = spent = 0.0
        for size, number in self.round_sizes.items():
            expected += number * expected_tokens(alpha, size.drafted)
            spent += number * (1 + c * num_steps(size.draft_steps))
        return expected / spent

    @property
    def forward_limited_speedup(self) -> float | None:
        """The speed-up if all steps after the prompt took no more time than their forwards; None if not measured.

        That is the number of tokens that rows got in them, over the number of plain steps that take as long.
        """
        costs = self._costs
        if costs is None or not self.round_sizes:
            return None if costs is None else 1.0
        plain = costs.target_seconds(self.rows, 1)
        taken = 0.0
        for size, number in self.round_sizes.items():
            drafting = costs.drafting_seconds(self.rows, size.draft_steps)
            taken += number * (costs.target_seconds(self.rows, 1 + size.max_candidates) + drafting)
        return self.new_tokens_in_rounds * plain / taken

    @property
    def _costs(self) -> Costs | None:
        return self.costs if self.costs is not None and self.costs.knows(self.rows) else None

    def to_dict(self) -> dict[str, Any]:
        """Counters and ratios as plain values, by the names in `REPORTED`."""
        return {name: getattr(self, name) for name in REPORTED}

    def __repr__(self) -> str:
        rows, rounds = (f"{n} {name}{'s' * (n != 1)}" for n, name in ((self.rows, "row"), (self.rounds, "round")))
        how = f"acceptance rate {self.acceptance_rate:.3f}, {self.verification} verification, {self.layout} layout"
        return f"SpeculationReport({self.emitted} new tokens in {rows}, {rounds}, {how})"

    def __str__(self) -> str:
        forced = f", {self.forced} of {self.drafted} candidates were the only token allowed" if self.forced else ""
        nodes = f", {self.nodes} with branches" if self.nodes > self.drafted else ""
        copied = f", {self.copied} tokens of prompts copied" if self.copied else ""
        alpha, rate = (f"{share:.3f}" if self.judged else "-" for share in (self.alpha, self.acceptance_rate))
        forwards = f"{self.plain_steps}, none over candidates"
        if self.rounds:
            forwards = f"{self.rounds} over up to {self.num_draft_tokens} candidates a row{nodes}, "
            forwards += f"{self.plain_steps} over none"
        lines = [
            f"{self.emitted} new tokens in {self.rows} row{'s' * (self.rows != 1)}; target forwards: {forwards}; "
            f"{self.verification} verification, {self.layout} layout{copied}",
            f"alpha {alpha}, acceptance rate {rate}, {self.tokens_per_round:.2f} tokens a row and round{forced}",
        ]
        lines += [reason for reason in (self.limit_reason, self.misread_reason, self.tree_reason) if reason]
        if self.tokenizer_match is not None:
            lines.append("another tokenizer, matched by {match} ({reason})".format_map(self.tokenizer_match))
        if len(self.sources) > 1:
            message = (f"{name} {n['accepted']} of {n['drafted']}" for name, n in self.sources.items())
            lines.append(f"accepted of proposed, by source: {', '.join(message)}")
        if self._costs:
            lines.append(
                f"draft step / target step {self.cost_coefficient:.2f}; speed-up by the times of forwards "
                f"alone {self.forward_limited_speedup:.2f}, by Theorem 3.8 {self.expected_speedup:.2f}"
            )
        if "total" in self.seconds:
            phases = ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items() if name != "total")
            lines.append(f"{self.seconds['total']:.2f} s" + (f" ({phases})" if phases else ""))
        return "\n".join(lines)


def records_of(round_: Round) -> list[RoundRecord]:
    """The counts of each of the R rows in a round."""
    draft, num_candidates, accepted_ranks, is_bonus = (
        round_.draft,
        round_.num_candidates,
        round_.accepted_ranks,
        round_.is_bonus,
    )
    records = []
    for index, drafted in enumerate(draft.lengths):
        flags = [] if draft.forced is None else draft.forced[index]
        records.append(
            RoundRecord(
                drafted,
                round_.accepted[index],
                round_.emitted[index],
                tuple(compress(range(drafted), flags)),
                num_candidates[index],
                tuple(accepted_ranks[index]),
                is_bonus[index],
            )
        )
    return records


def _joined_reasons(first: str, second: str) -> str:
    """Two reasons as one; what one of them says already is not said twice."""
    if first in second:
        return second
    return first if second in first else f"{first}; {second}"


def _added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Sums by name; what only one has counts as it is."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
