"""What decodes one call: put together before anything is read, so that refusals come before any forward."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hf_specx.common.drafts import FIXED_DRAFT_TOKENS
from hf_specx.common.round import Listener, Round
from hf_specx.drafting.auto import AutoDraftLength
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.drafter import DraftContext, Drafter
from hf_specx.drafting.forward_times import QUERY_LENGTHS, TREE_QUERY_LENGTHS, assumed_times, size_of
from hf_specx.drafting.round_timer import RoundTimer
from hf_specx.drafting.schedule import DraftLengthSchedule
from hf_specx.drafting.several import SeveralDrafts
from hf_specx.drafting.trees import COMPILED_NODES, RankEstimate, TreeShapes
from hf_specx.models.choose import make_runner
from hf_specx.models.prompts import draft_prompt
from hf_specx.models.runner import ModelRunner
from hf_specx.models.self_check import tokens_of_a_round
from hf_specx.models.slots import write_user_cache
from hf_specx.sampling.per_request import RequestProcessors
from hf_specx.sampling.processors import NO_LIMIT, Processors
from hf_specx.sampling.verifiers import make_verifier

from .call import Call
from .check_options import MAX_NODES
from .outputs import Outputs, Stream
from .ranks import any_rank, of_first_rank
from .report import SpeculationReport
from .request_results import KEPT_ROUNDS
from .requests import PreparedRequest


NOISE_WINDOW = 8  # rounds for which the noise of a row is kept under coupled verification


class Run:
    """The decoding of one call: what the loop in `decode.py` asks in each round.

    Args:
        call: what was asked for, and how it is decoded.
        costs: what "auto" goes by; the call adds what it has shown.
        target: has read the prompts; None makes one that will.

    Attributes:
        batch: the text; `finished` says whether all of its rows have ended.
        target, verifier, drafter, schedule: what the loop asks in each round.
        processors: of the target and of the draft.
        report, outputs, stream: what the caller gets; the latter two are None where they are not asked for.
        listeners: are told of each round first, before any row leaves.
    """

    schedule: DraftLengthSchedule

    def __init__(self, call: Call, costs: Costs, target: ModelRunner | None = None):
        prompt, strategy = call.prompt, call.strategy
        self.call = call
        self.costs = costs
        self.stopping = call.stopping
        self.batch = call.make_batch()
        self.finished = False
        self.has_prefilled = target is not None
        self.target = target or make_runner(call.layout.target, prompt, compiled=strategy.compile)
        self.processors = self._make_processors()
        window = NOISE_WINDOW * (1 + call.max_draft_tokens)
        self.verifier = make_verifier(call.verification, prompt.input_ids, window, seeded=call.seeds is not None)
        # times differ from rank to rank, and drafts that go by them would differ as well
        timer_costs = None if call.tensor_parallel else costs
        self.round_timer = RoundTimer(timer_costs, online=call.verification in ("greedy", "coupled"))
        self.tree_shapes = self._make_tree_shapes()
        own_model = None if call.drafter.has_other_tokenizer else call.drafter.model
        self.draft_prompt = None if own_model is None else draft_prompt(own_model, prompt)
        # they give rows unequal numbers of candidates, and ranks and compiled forwards need the same
        self.allow_forced_tokens = not (call.synced_gpus or strategy.compile)
        self.drafter = self._make_drafter()
        self.report = self._make_report()
        config = prompt.generation_config
        self.outputs = Outputs(config, len(prompt.input_ids)) if config.return_dict_in_generate else None
        self.stream = None if strategy.streamer is None else Stream(call)
        results = None if call.queue is None else call.queue.results
        listeners = [self.report, self.tree_shapes, self.outputs, self.stream, *strategy.listeners, results]
        self.listeners: list[Listener] = [listener for listener in listeners if listener is not None]
        self.started = self.phase_started = time.perf_counter()

    def _make_processors(self) -> Processors:
        """The processors of the call, or those of a queue's requests, with how many candidates the target takes."""
        call = self.call
        limit = NO_LIMIT
        round_size = tokens_of_a_round(call.prompt.model)
        if round_size is not None:
            limit = round_size - 1, f"the target's experts take {round_size} tokens of a row at once"
        if call.measured_candidates is not None and call.measured_candidates < limit[0]:
            limit = call.measured_candidates, "the target was measured with so many"
        if call.queue is not None:
            return RequestProcessors(self.batch, self.stopping.eos_token_ids, limit)
        return Processors(call.processors, self.stopping.eos_token_ids, limit)

    def _make_drafter(self) -> Drafter:
        """The drafter of the call; one without a model gets forced tokens from a `SeveralDrafts` of it alone."""
        drafter = self.call.drafter
        may_have_masks = self.processors.mask_size > 0 or self.call.queue is not None  # later requests may bring some
        adds_forced_tokens_itself = drafter.has_probs or drafter.parts
        if self.allow_forced_tokens and may_have_masks and not adds_forced_tokens_itself:
            return SeveralDrafts([drafter])
        return drafter

    def _make_tree_shapes(self) -> TreeShapes | None:
        """The shapes of trees, where candidates of the call may branch."""
        call, max_nodes = self.call, self.batch.max_nodes
        if not max_nodes:
            return None
        numbers = COMPILED_NODES if call.strategy.compile else range(1, 1 + MAX_NODES)
        nodes = "auto" if call.tree == "auto" else max_nodes
        ranks = self.costs.rank_estimates.setdefault(call.verification, RankEstimate())
        chooses_depth = call.fixed_draft_tokens is None  # else that number is the depth
        return TreeShapes(nodes, self.round_timer, ranks, [n for n in numbers if n <= max_nodes], chooses_depth)

    def _make_report(self) -> SpeculationReport:
        """The report of the call, with all counters at 0."""
        call, max_rollback = self.call, self.processors.max_rollback
        tokenizer_match = call.drafter.tokenizer_match
        limit_reason = ""
        if max_rollback < call.max_draft_tokens:
            limit_reason = f"no row has more than {max_rollback} candidates: {self.processors.limited_by}"
        return SpeculationReport(
            call.verification,
            call.layout.target,
            call.layout.reason,
            len(call.prompt.input_ids),
            limit_reason,
            costs=self.costs,
            max_history=None if call.queue is None else KEPT_ROUNDS,
            tokenizer_match=None if tokenizer_match is None else tokenizer_match._asdict(),
            tree_reason=call.tree_reason,
        )

    def begin(self) -> None:
        """Read the prompts, start the drafter, and decide how many candidates to draft."""
        call = self.call
        if self.stream is not None:
            self.stream.prompt(self.batch)
        if not self.has_prefilled:
            self.target.prefill()
        self.verifier.start()  # `generate` draws its first random number after this forward
        context = DraftContext(
            batch=self.batch,
            target=self.target,
            vocab_size=self.target.prompt_logits.shape[-1],
            verifier=self.verifier,
            processors=self.processors,
            threshold=call.draft_settings.threshold,
            prompt=self.draft_prompt,
            layout=call.layout.draft,
            compiled=call.strategy.compile,
            allow_forced_tokens=self.allow_forced_tokens,
            round_timer=self.round_timer,
            num_draft_tokens=call.draft_settings.num_draft_tokens,
            alpha=None if call.tensor_parallel else self.costs.alpha.get(call.verification),
            tree_shapes=self.tree_shapes,
        )
        self.drafter.start(context)
        self.schedule = self._make_schedule()
        self.phase_started = time.perf_counter()

    def _make_schedule(self) -> DraftLengthSchedule:
        """The number of candidates that was asked for, "auto", or a fixed number where "auto" has nothing to go by."""
        call = self.call
        round_timer = self._timer_of_auto()
        options: dict[str, Any] = {"equal_lengths": call.synced_gpus, "processors": self.processors}
        if round_timer is not None and (call.synced_gpus or call.tensor_parallel):
            options["agree"] = partial(of_first_rank, device=self.batch.ids.device)
        num_draft_tokens, max_candidates = call.fixed_draft_tokens, self.drafter.max_candidates
        if num_draft_tokens is not None:
            return DraftLengthSchedule(num_draft_tokens, round_timer, **options)
        if round_timer is None:
            return DraftLengthSchedule(max_candidates or FIXED_DRAFT_TOKENS, **options)
        compiled = call.strategy.compile
        return AutoDraftLength(round_timer, call.verification, self.batch, compiled, max_candidates, **options)

    def _timer_of_auto(self) -> RoundTimer | None:
        """What "auto" goes by, with the times of this batch size; None where it decides nothing, or knows no times.

        It decides how many candidates there are, or how they branch.
        """
        call = self.call
        is_fixed = call.draft_settings.num_draft_tokens is not None
        chooses_tree = self.tree_shapes is not None and self.tree_shapes.nodes == "auto"
        independent_lengths = any(row_state.independent_lengths for row_state in self.batch.row_states)
        if independent_lengths or (is_fixed and not chooses_tree):
            return None
        # one round after the prompt's has hardly a candidate; other ranks and later requests may have longer texts
        is_long = self.stopping.max_new_tokens > 2 or call.synced_gpus or call.queue is not None
        draft_step = self.drafter.cost(self.batch) if is_long else None
        if draft_step is None:
            return None
        self._measure_costs(draft_step)
        self.round_timer.start()
        if call.tensor_parallel:
            return RoundTimer(self.costs, self.round_timer.online)  # for the schedule alone, whose ranks agree
        return self.round_timer

    def _measure_costs(self, draft_step: Callable[[int], object]) -> None:
        """Have times of this batch size in the costs: assumed by the models' sizes, or measured once."""
        call, costs, rows = self.call, self.costs, len(self.batch.rows)
        target_step, device = partial(self.target.dummy_run, self.batch), self.batch.ids.device
        if call.synced_gpus:
            if any_rank(rows not in costs.forward_times, device):  # then all ranks measure together
                costs.measure(rows, target_step, draft_step)
            return
        # what is compiled has no forwards of other lengths than its rounds
        has_large_trees = self.tree_shapes is not None and not call.strategy.compile
        query_lengths = TREE_QUERY_LENGTHS if has_large_trees else QUERY_LENGTHS
        only_timing_tells = call.tensor_parallel or call.strategy.compile
        earlier = costs.forward_times.get(rows)
        if earlier is None and not only_timing_tells:
            target_size, draft_size = size_of(self.target.model), self.drafter.size()
            if target_size is not None and draft_size is not None:
                earlier = assumed_times(target_size, draft_size, rows, device)
        costs.prepare(rows, target_step, draft_step, earlier, query_lengths)

    def calibrate(self) -> None:
        """Time bare forwards of both models after the prompts, and put the times into the costs."""
        self.begin()
        draft_step = self.drafter.cost(self.batch) or (lambda _: None)
        self.costs.measure(len(self.batch.rows), partial(self.target.dummy_run, self.batch), draft_step)

    def active(self) -> bool:
        """Whether some row goes on; while only other ranks have such rows, forwards are run here to keep step."""
        while self.call.synced_gpus and any_rank(not self.finished, self.batch.ids.device):
            if not self.finished:
                return True
            self.dummy_round()
        return not self.finished

    def dummy_round(self) -> None:
        """Run the forwards of a round on a copy of the finished text, whose last rows are still in the caches."""
        batch = self.batch.view_at(self.batch.counts)  # whose ends follow cuts of the rows
        batch.ids = batch.ids.clone()
        draft = batch.write_draft(self.drafter.propose(batch, self.schedule(batch)))
        self.target(batch, draft)

    def publish(self, round_: Round) -> None:
        """Tell the listeners of a round, once it is known which rows have ended in it.

        Raises:
            Exception: the error of a row in which no token can come next, as `generate` raises it.
        """
        self._end_rows_without_next_token(round_)
        if self.call.queue is not None:
            self._end_cancelled_rows(round_)
        for listener in self.listeners:
            listener.observe(round_)

    def _end_rows_without_next_token(self, round_: Round) -> None:
        """End requests whose own processors leave no next token; raises the error of any other such row."""
        for row, error in self.stopping.row_errors(round_, self.processors.prefix_errors).items():
            request = self.batch.row_states[row].request
            if request is None or not request.has_own_processors:
                raise error
            self._end_row(round_, row)

    def _end_cancelled_rows(self, round_: Round) -> None:
        for row in round_.rows:
            if row not in round_.ended and self.batch.row_states[row].request.is_cancelled():
                self._end_row(round_, row)

    def _end_row(self, round_: Round, row: int) -> None:
        """Have a row end in this round, with the tokens that it has."""
        row_state = self.batch.row_states[row]
        if row_state.stopped_at is None:
            row_state.stopped_at = self.batch.counts[row]
        round_.ended = sorted({*round_.ended, row})

    def next_requests(self, round_: Round) -> dict[int, PreparedRequest]:
        """The next requests of a queue, by the row whose place each takes: one that has ended, or a free one."""
        if self.call.queue is None or not self.call.layout.refills:
            return {}
        return self.call.queue.next_requests(self.batch, round_.ended)

    def end_round(self, round_: Round, requests: Mapping[int, PreparedRequest]) -> None:
        """Drop rows that have ended and get no request; then tell schedule, drafter and target what was kept.

        The last rows of a call to end stay in the batch.
        """
        dropped = [row for row in round_.ended if row not in requests]
        self.finished = len(dropped) == len(round_.rows)
        assert not (self.finished and requests)  # places of rows that have ended are filled before free ones
        keep_indices = None if self.finished else self.batch.drop_rows(dropped)
        round_ = replace(round_, keep_indices=keep_indices, finished=self.finished)
        if self.target.is_half_idle:  # what a round takes is not what one of so many rows would
            self.round_timer.skip()
        self.schedule.observe(round_)
        self.drafter.observe(round_)
        self.target.observe(round_)
        self.end_phase("verify")

    def admit(self, requests: Mapping[int, PreparedRequest]) -> None:
        """Replace rows by the next requests, and compute their prompts."""
        if not requests:
            return
        batch, rows = self.batch, list(requests)
        if not requests.keys() <= set(batch.rows):  # some come in free places
            previous_indices = batch.add_rows(requests)
            self.target.add_rows(batch, previous_indices)
            self.drafter.add_rows(batch, previous_indices)
        for row, request in requests.items():
            batch.admit(row, self.call.make_row_state(request, is_refill=True), request.input_ids)
        self.schedule.admit(batch, rows)
        self.target.admit(batch, rows)
        self.drafter.admit(batch, rows)
        self.end_phase("read")

    def end_phase(self, phase: str) -> None:
        """Add the time since the last phase ended to this one's seconds in the report."""
        now = time.perf_counter()
        self.report.seconds[phase] = self.report.seconds.get(phase, 0.0) + now - self.phase_started
        self.phase_started = now

    def finish(self) -> None:
        """End the call: complete the report, and add to the costs what the call has shown."""
        columns, report, draft = self.stopping.num_output_columns(self.batch), self.report, self.drafter.runner
        self.verifier.finish(columns)
        self.schedule.end()
        cut = columns if self.call.queue is None else sys.maxsize  # requests end on their own, one after another
        report.finish(time.perf_counter() - self.started, cut)
        report.misread_reason = self.drafter.misread_reason(self.batch)
        report.compilations, report.copied = self.target.compilations, self.target.reused_tokens
        if getattr(draft, "model", None) is not self.target.model:  # else these were counted
            report.compilations += getattr(draft, "compilations", 0)
        self.costs.remember(
            report.verification, report.conditional_acceptance, report.acceptance_sums[1], report.rounds
        )

    def output(self) -> Any:
        """What `generate` returns: the text [B, L + N], or an output with the report; a user's cache is filled."""
        prompt, columns = self.call.prompt, self.stopping.num_output_columns(self.batch)
        sequences = self.batch.output(columns)
        past = self.target.past_key_values(self.batch, columns) if prompt.returns_cache else None
        if getattr(prompt.past, "_is_user_defined", False):  # so far it was only read
            past = write_user_cache(prompt.past, past)
        if self.outputs is None:
            return sequences
        return self.outputs.finish(sequences, columns, past, prompt.model.config.is_encoder_decoder, self.report)
