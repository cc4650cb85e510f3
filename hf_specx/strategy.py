"""The strategy: check what was asked for, choose layouts and the number of candidates, run the loop."""

import copy
import sys
import time
import warnings
import weakref
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import LogitsProcessorList, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import ModelOutput

from hf_specx.cache.export import fill
from hf_specx.common.wrappers import unwrapped
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.draft_length import MAX_DRAFT_TOKENS
from hf_specx.drafting.schedule import Auto, Schedule, choose_drafting
from hf_specx.engine.decode import decode
from hf_specx.engine.plan import Plan, check_plan, make_plan
from hf_specx.engine.prefill import (
    begin_schedule,
    draft_decoder,
    make_sequences,
    measure,
    prefill,
    stateful_processors,
)
from hf_specx.engine.ranks import Peers, synced_by_default
from hf_specx.engine.report import SpeculationReport
from hf_specx.engine.settle import Run
from hf_specx.engine.streaming import Stream
from hf_specx.layouts.choose import make_decoder
from hf_specx.layouts.compiled import compilations
from hf_specx.layouts.decoder import Prompt, vocabulary
from hf_specx.layouts.prompts import draft_prompt, prepare
from hf_specx.sampling.noise import StockNoise
from hf_specx.sampling.rules import CoupledRule
from hf_specx.sampling.stopping import Stopping
from hf_specx.validation.calls import check_call, check_outputs
from hf_specx.validation.entry import check_withheld
from hf_specx.validation.inputs import check_inputs
from hf_specx.validation.models import check_pair, check_target
from hf_specx.validation.options import check_calibration, check_options
from hf_specx.validation.rows import as_list, check_guidance


NOISE_WINDOW = 8  # rounds for which the shared noise of a row is held
LOCKSTEP_COST = (
    "all rows advance by the batch minimum, which costs the more rounds the larger the batch, since nothing better "
    "has been shown to be exact here; layout='lockstep' says that this is wanted."
)


class SpeculativeDecoding:
    """Speculative sampling for `model.generate(..., custom_generate=strategy)`.

    With `do_sample=False` the verifier is greedy whatever `verification` says. The strategy may serve many calls; it
    remembers costs and acceptance from one to the next. Calls in several threads may share it if they have the same
    target and no streamer. `generate` takes one more argument: `seeds`, one int for each row (after
    `num_return_sequences`) in a list, range, tensor or array, makes each row independent of its batch mates; under
    "coupled" it is the text of stock for this row alone under `torch.manual_seed` of its seed.

    Args:
        draft_model: a model with the target's vocabulary, also one that `torch.compile` or PEFT is put around, or a
            `CandidateGenerator` that goes by the text alone.
        num_draft_tokens: candidates a round; "auto" takes for each round the number from 0 to 8 with the most expected
            tokens a second, by the acceptance seen so far and a cost table that is measured before the first token of
            the first call at each batch size. An int counts more than `num_assistant_tokens` of the call or of the
            draft's own file, "auto" less.
        verification: "block", "token", or "coupled", which gives the tokens of stock sampling under the same
            `torch.manual_seed`. None is "block", but "token" where a processor or criterion keeps state, and "coupled"
            for a `CandidateGenerator`.
        layout: how rows of unequal length share a batch: "ragged", "padded", "packed" or "lockstep"; "auto" takes the
            best one that was shown to be exact for the architecture.
        compile: whether to compile the forwards behind the prompts, for fixed sizes of batch, text and query; on CUDA
            they are captured in graphs. The first call of each size takes seconds longer. On an x86 CPU the weights of
            linear layers are kept once more, in the order in which oneDNN multiplies by them.
        streamer: gets the prompt and then the tokens as they are emitted; for more than one row a `BatchStreamer`.
        stream_by: "token", one at a time as in stock, or "run", all that a round emitted.
        tokenizer: the target's, and `draft_tokenizer` the draft's: with both, vocabularies are compared token by token
            and may differ in padding; otherwise they must be equally large.
        costs: of an earlier strategy (`strategy.costs`), so that this one drafts the same numbers.

    Attributes:
        report: the `SpeculationReport` of the last call, None before the first.
        costs: what "auto" goes by: times of bare forwards, and of rounds and acceptance in the calls so far. Started
            anew when the strategy is used with another target.
        schedule: how many candidates the next round drafts; "heuristic" goes on from call to call.
        adds_reports, given_drafting, synced_gpus: set by `hf_specx.generate`, which has a strategy for each call: if
            reports add up, since Whisper decodes in windows, and arguments that transformers does not pass on as they
            were.

    Raises:
        ValueError: for an option that is unknown, unsupported or contradicts another.

    Example:
        >>> strategy = SpeculativeDecoding(draft_model)
        >>> model.generate(**inputs, do_sample=True, max_new_tokens=128, custom_generate=strategy)
    """

    def __init__(
        self,
        draft_model: PreTrainedModel | CandidateGenerator,
        *,
        num_draft_tokens: str | int = "auto",
        verification: str | None = None,
        layout: str = "auto",
        compile: bool = False,
        streamer: BaseStreamer | None = None,
        stream_by: str = "token",
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
        costs: Costs | None = None,
        **unknown: Any,
    ):
        options = {
            "num_draft_tokens": num_draft_tokens,
            "verification": verification,
            "layout": layout,
            "compile": compile,
            "streamer": streamer,
            "stream_by": stream_by,
            "tokenizer": tokenizer,
            "draft_tokenizer": draft_tokenizer,
            "costs": costs,
        }
        draft_model = unwrapped(draft_model, adapters=True)
        check_options(options, unknown, draft_model)
        self.draft_model, self.num_draft_tokens, self.layout = draft_model, num_draft_tokens, layout
        self.compile = compile
        self.verification, self.streamer, self.stream_by = verification, streamer, stream_by
        self.tokenizer, self.draft_tokenizer = tokenizer, draft_tokenizer
        self.costs = costs if costs is not None else Costs()
        self.schedule = Schedule()
        self.report: SpeculationReport | None = None
        self.adds_reports = False
        self.given_drafting: dict[str, Any] | None = None
        self.synced_gpus: bool | None = None
        self._said: set[str] = set()  # shared with the copies that a pair makes of its strategy
        self._served: weakref.ref[PreTrainedModel] | None = None

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: torch.Tensor | None = None,
        seeds: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | ModelOutput:
        """What `GenerationMixin.generate` calls after its preparations; see there for the arguments.

        Returns:
            [B, L + N] int64, or with `return_dict_in_generate=True` what stock returns, the report being its attribute
            `speculation_report`; see `Outputs`.

        Raises:
            ValueError: before any forward, for what cannot be done exactly.
        """
        stream = Stream(self.streamer, self.stream_by)
        try:
            check_withheld(sys._getframe(2))  # 1 is torch.no_grad's wrapper
            user_cache = model_kwargs.get("past_key_values")
            given = getattr(user_cache, "_is_user_defined", False)
            if given:
                model_kwargs["past_key_values"] = copy.deepcopy(user_cache)  # it is changed once all went well
            keeps_past = bool(generation_config.return_dict_in_generate or given)
            stopping = Stopping(stopping_criteria, input_ids.shape[1], generation_config.max_length)
            prompt = Prompt(model, input_ids, generation_config, model_kwargs, stopping.max_new_tokens, keeps_past)
            sequences, run = self._run(prompt, inputs_tensor, logits_processor, stopping, as_list(seeds), stream)
        finally:
            stream.end()
        past = run.target.past(run.sequences, stopping.columns) if prompt.keeps_past else None
        if user_cache is not None and given:
            past = fill(user_cache, past)
        if not generation_config.return_dict_in_generate:
            return sequences
        return run.outputs.finish(
            sequences, stopping.columns, past, model_kwargs, model.config.is_encoder_decoder, run.report
        )

    def _run(
        self,
        prompt: Prompt,
        inputs_tensor: torch.Tensor | None,
        processors: LogitsProcessorList,
        stopping: Stopping,
        seeds: list[int] | None,
        stream: Stream,
    ) -> tuple[torch.Tensor, Run]:
        self._check(prompt, processors)
        waiting = [type(p).__name__ for p in stateful_processors(processors, prompt)] + stopping.stateful
        peers = Peers(self._is_synced(prompt.model), prompt.input_ids.device)
        asked = self.layout, self.verification, waiting, self.compile, peers.synced
        plan = make_plan(prompt, self.draft_model, *asked)
        prompt.keeps_past &= not peers.synced  # what it takes differs between ranks
        fixed = peers.synced or (seeds is not None and plan.verification in ("token", "block"))
        drafting = choose_drafting(
            self.num_draft_tokens, self.given_drafting, prompt.generation_config, self.draft_model
        )
        check_plan(plan, drafting, seeds, len(prompt.input_ids), fixed, peers.synced)
        self.meet(prompt.model)
        costs, schedule = self.costs, copy.copy(self.schedule)  # as other threads may use the strategy
        self._warn(plan, len(prompt.input_ids))
        started = time.perf_counter()
        report = SpeculationReport(plan.verification, plan.layout, plan.reason, len(prompt.input_ids), costs=costs)
        run = prefill(prompt, inputs_tensor, plan, self.draft_model, processors, stopping, stream, report, seeds)
        run.fixed = fixed
        chosen = begin_schedule(schedule, drafting, costs, run)
        if isinstance(run.rule, CoupledRule) and isinstance(run.rule.noise, StockNoise):
            run.rule.noise.window = NOISE_WINDOW * (chosen.most + 1)
        earlier, self.report = self.report if self.adds_reports else None, report
        text = decode(run, chosen, peers)
        report.finish(time.perf_counter() - started, stopping.columns)
        costs.remember(plan.verification, report.survival_rate, report.survival[1])
        if isinstance(chosen, Auto):
            chosen.end()
        report.compilations = compilations(run.target, draft_decoder(run))
        run.report = report if earlier is None else earlier + report
        self.report, self.schedule = run.report, schedule
        return text, run

    def _check(self, prompt: Prompt, processors: LogitsProcessorList) -> None:
        model, config = prompt.model, prompt.generation_config
        check_target(model, _width(prompt) + prompt.max_new_tokens)
        asked = self.verification if config.do_sample else "greedy"
        check_call(prompt.input_ids, config, prompt.kwargs, asked or "block", self.streamer)
        check_inputs(model, prompt.input_ids, config, prompt.kwargs)
        check_outputs(model, config)
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                check_guidance(processor, model, len(prompt.input_ids))
        if isinstance(self.draft_model, PreTrainedModel):
            check_pair(model, self.draft_model, self.tokenizer, self.draft_tokenizer)

    def _is_synced(self, model: PreTrainedModel) -> bool:
        if self.synced_gpus is not None:
            return self.synced_gpus
        drafts = [self.draft_model] if isinstance(self.draft_model, PreTrainedModel) else []
        return synced_by_default(model, *drafts)

    def meet(self, model: PreTrainedModel) -> None:
        """Forget what was learned on another target."""
        if self._served is not None and self._served() is not model:
            self.costs, self.schedule = Costs(), Schedule()
        self._served = weakref.ref(model)

    def _warn(self, plan: Plan, rows: int) -> None:
        """Say what is slow, once."""
        slow = plan.lockstep and not plan.in_order and rows > 1 and self.layout == "auto"
        if slow and LOCKSTEP_COST not in self._said:
            self._said.add(LOCKSTEP_COST)
            warnings.warn(LOCKSTEP_COST, UserWarning, stacklevel=2)

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, input_ids: torch.Tensor) -> None:
        """Time bare forwards of both models at this batch and length, and note them in `costs`.

        Args:
            model: the target.
            input_ids: [B, L] int64, as `generate` takes them; their meaning does not matter.

        Raises:
            ValueError: if the draft is a `CandidateGenerator`.
        """
        check_calibration(self.draft_model)
        assert isinstance(self.draft_model, PreTrainedModel)
        model = unwrapped(model)
        self.meet(model)
        given = {"inputs": input_ids, "attention_mask": torch.ones_like(input_ids)}
        prompt = prepare(model, MAX_DRAFT_TOKENS + 1, given)
        plan = make_plan(prompt, self.draft_model, self.layout, self.verification, [], self.compile)
        target = make_decoder(plan.layout, prompt, compiled=plan.compiled)
        own = draft_prompt(self.draft_model, prompt, input_ids)
        draft = make_decoder(plan.draft_layout, own, vocabulary(own.model), plan.compiled)
        target.read()
        draft.read()
        measure(self.costs, make_sequences(prompt), target, draft)


def _width(prompt: Prompt) -> int:
    """Columns of the text so far, also where it is passed as embeddings, or its last part alone behind a cache."""
    if prompt.model.config.is_encoder_decoder:
        return prompt.input_ids.shape[1]
    mask = prompt.kwargs.get("attention_mask")
    known = getattr(prompt.generation_config, "_mask_length", prompt.input_ids.shape[1])
    return known if mask is None else mask.shape[-1]
