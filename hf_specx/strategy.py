"""The strategy: check what a call asks for, choose layouts and the number of candidates, run the loop."""

import copy
import sys
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessorList, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import ModelOutput

from hf_specx.cache.export import fill
from hf_specx.common.wrappers import unwrapped, unwrapped_draft
from hf_specx.drafting.candidates import AnyDraft, make_drafter
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.draft_length import MAX_DRAFT_TOKENS
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.schedule import Schedule, choose_drafting
from hf_specx.engine.decode import decode
from hf_specx.engine.in_order import decode_in_order
from hf_specx.engine.plan import Call, Listener, Plan, Withheld, make_plan
from hf_specx.engine.ranks import is_synced
from hf_specx.engine.report import SpeculationReport
from hf_specx.engine.start import start, stateful_processors
from hf_specx.engine.streaming import ended
from hf_specx.layouts.compiled import compilations
from hf_specx.layouts.decoder import vocabulary
from hf_specx.layouts.prompts import Prompt, prepare
from hf_specx.sampling.stopping import Stopping
from hf_specx.validation.calls import check_call, check_outputs
from hf_specx.validation.entry import check_withheld
from hf_specx.validation.inputs import check_inputs
from hf_specx.validation.models import check_pair, check_target
from hf_specx.validation.options import check_calibration, check_options
from hf_specx.validation.rows import as_list, check_guidance


LOCKSTEP_COST = (
    "all rows advance by the batch minimum, which costs the more rounds the larger the batch, since nothing better "
    "has been shown to be exact here; layout='lockstep' says that this is wanted."
)


class SpeculativeDecoding:
    """Speculative sampling for `model.generate(..., custom_generate=strategy)`.

    With `do_sample=False` the verifier is greedy whatever `verification` says. The strategy may serve many calls; it
    remembers costs and acceptance from one to the next. Calls in several threads may share it if they have the same
    target and no streamer. `generate` takes one more argument: `seeds`, one int for each row (after
    `num_return_sequences`) in a list, range, tensor or array, makes each row independent of the others; under
    "coupled" its text is that of plain `generate` for this row alone under `torch.manual_seed` of its seed.

    Args:
        draft_model: a model with the target's vocabulary, also wrapped by `torch.compile` or PEFT; a
            `CandidateGenerator` that reads the text alone; a `Drafter`: `SuffixDraft`, or one of your own; or a list
            of these with at most one model, as `[SuffixDraft(), draft_model]`: each row and round takes its
            candidates from the one that promises more tokens a second, by what was kept so far.
        num_draft_tokens: the number of candidates of each round. "auto" takes the number from 0 to 8 with the most
            expected tokens per second, by the acceptance seen so far and a cost table that is measured before the
            first token of the first call at each batch size. An int wins over `num_assistant_tokens` of the call or
            of the draft's `generation_config`; "auto" gives way to it.
        verification: "block", "token", or "coupled", which gives the tokens that plain `generate` samples under the
            same `torch.manual_seed`. None is "block", but "token" if a processor or criterion keeps state, and
            "coupled" if candidates are not drawn from a distribution, as those of a `CandidateGenerator` or
            `SuffixDraft`; "token" and "block" accept such a candidate x with probability p(x) or more.
        layout: how rows of unequal length share a batch: "ragged", "padded", "packed" or "lockstep"; "auto" takes the
            best one that was shown to be exact for the architecture.
        compile: whether to compile the forwards after the prompts, for fixed sizes of batch, text and query; on CUDA
            they are captured in graphs. The first call of each size takes seconds longer. On an x86 CPU a second copy
            of the weights of linear layers is kept, in the order in which oneDNN reads them.
        streamer: gets the prompt and then the tokens as they are emitted; for more than one row a `BatchStreamer`.
        stream_by: "token", one at a time as in `generate`, or "run", all that a round emitted.
        tokenizer: the target's, and `draft_tokenizer` the draft's: with both, vocabularies are compared token by token
            and may differ in padding; otherwise they must be equally large.
        costs: of an earlier strategy (`strategy.costs`), so that this one drafts the same numbers.

    Attributes:
        report: the `SpeculationReport` of the last call, None before the first.
        costs: what "auto" goes by: times of bare forwards, times of rounds, and acceptance in the calls so far. Empty
            again when the strategy is used with another target.
        schedule: the `Schedule` of the last call; with "heuristic" the next one goes on from its number.
        listeners: objects with a method `observe`, which is given the `Round` of each round.

    Raises:
        ValueError: if an option is unknown, unsupported or contradicts another.

    Example:
        >>> strategy = SpeculativeDecoding(draft_model)
        >>> model.generate(**inputs, do_sample=True, max_new_tokens=128, custom_generate=strategy)
    """

    def __init__(
        self,
        draft_model: AnyDraft | Sequence[AnyDraft],
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
        draft_model = unwrapped_draft(draft_model)
        check_options(options, unknown, draft_model)
        self.draft_model, self.num_draft_tokens, self.layout = draft_model, num_draft_tokens, layout
        self.compile = compile
        self.verification, self.streamer, self.stream_by = verification, streamer, stream_by
        self.tokenizer, self.draft_tokenizer = tokenizer, draft_tokenizer
        self.costs = costs if costs is not None else Costs()
        self.schedule: Schedule | None = None
        self.report: SpeculationReport | None = None
        self.listeners: tuple[Listener, ...] = ()
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
            [B, L + N] int64, or with `return_dict_in_generate=True` the output of `generate`, with the report as its
            attribute `speculation_report`; see `Outputs`.

        Raises:
            ValueError: before any forward, if the call cannot be done exactly.
        """
        given = logits_processor, stopping_criteria, generation_config, inputs_tensor, seeds
        with ended(self.streamer):
            check_withheld(sys._getframe(2))  # 1 is torch.no_grad's wrapper
            return self.decode(Withheld(), model, input_ids, *given, **model_kwargs)

    @torch.no_grad()
    def decode(
        self,
        withheld: Withheld,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: torch.Tensor | None = None,
        seeds: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | ModelOutput:
        """As `__call__`, with what transformers does not pass on; the streamer is ended by the caller."""
        user_cache = model_kwargs.get("past_key_values")
        given = getattr(user_cache, "_is_user_defined", False)
        if given:
            model_kwargs["past_key_values"] = copy.deepcopy(user_cache)  # the user's own is filled at the end
        config, drafter = generation_config, make_drafter(self.draft_model)
        stopping = Stopping(stopping_criteria, input_ids.shape[1], config.max_length)
        prompt = Prompt(model, input_ids, config, model_kwargs, stopping.max_new_tokens)
        prompt.keeps_past, prompt.gives_hidden = bool(config.return_dict_in_generate or given), drafter.needs_hidden
        self._check(prompt, logits_processor, drafter)
        call = self._asked(withheld, prompt, drafter, as_list(seeds))
        prompt.keeps_past &= not call.synced  # it may take forwards that other ranks do not run
        waiting = [type(p).__name__ for p in stateful_processors(logits_processor, prompt)] + stopping.stateful
        plan = make_plan(call, prompt, drafter, waiting)
        self.meet(model)
        self._warn(plan, len(input_ids))
        costs, earlier = self.costs, self.report if withheld.adds_reports else None
        given_to_start = inputs_tensor, drafter, logits_processor, stopping, costs, self.schedule
        run = start(call, plan, prompt, *given_to_start)
        self.report = run.report
        text = decode_in_order(run) if plan.in_order else decode(run)
        run.report.compilations = compilations(run.target, drafter.decoder)
        costs.remember(plan.verification, run.report.survival_rate, run.report.survival[1])
        self.report = run.report if earlier is None else earlier + run.report
        self.schedule = run.schedule
        past = run.target.past(run.batch, stopping.columns) if prompt.keeps_past else None
        if user_cache is not None and given:
            past = fill(user_cache, past)
        if not config.return_dict_in_generate:
            return text
        decodes = model.config.is_encoder_decoder
        return run.outputs.finish(text, stopping.columns, past, model_kwargs, decodes, self.report)

    def _asked(self, withheld: Withheld, prompt: Prompt, drafter: Drafter, seeds: list[int] | None) -> Call:
        """What one call asks for."""
        config = prompt.generation_config
        models = [prompt.model] if drafter.model is None else [prompt.model, drafter.model]
        return Call(
            verification=self.verification,
            layout=self.layout,
            compile=self.compile,
            streamer=self.streamer,
            stream_by=self.stream_by,
            drafting=choose_drafting(self.num_draft_tokens, withheld.drafting, config, drafter.model),
            seeds=seeds,
            synced=is_synced(withheld.synced_gpus, *models),
            listeners=self.listeners,
        )

    def _check(self, prompt: Prompt, processors: LogitsProcessorList, drafter: Drafter) -> None:
        model, config = prompt.model, prompt.generation_config
        check_target(model, _width(prompt) + prompt.max_new_tokens)
        asked = self.verification if config.do_sample else "greedy"
        check_call(prompt.input_ids, config, prompt.kwargs, asked or "block", self.streamer)
        check_inputs(model, prompt.input_ids, config, prompt.kwargs)
        check_outputs(model, config)
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                check_guidance(processor, model, len(prompt.input_ids))
        drafter.meet(vocabulary(model))
        if drafter.model is not None:
            check_pair(model, drafter.model, self.tokenizer, self.draft_tokenizer)

    def meet(self, model: PreTrainedModel) -> None:
        """Forget costs and schedule if the last call had another target."""
        if self._served is not None and self._served() is not model:
            self.costs, self.schedule = Costs(), None
        self._served = weakref.ref(model)

    def _warn(self, plan: Plan, rows: int) -> None:
        """Warn once of what is slow."""
        slow = plan.lockstep and not plan.in_order and rows > 1 and self.layout == "auto"
        if slow and LOCKSTEP_COST not in self._said:
            self._said.add(LOCKSTEP_COST)
            warnings.warn(LOCKSTEP_COST, UserWarning, stacklevel=2)

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, input_ids: torch.Tensor) -> None:
        """Time bare forwards of both models at this batch size and length, and put the times into `costs`.

        Args:
            model: the target.
            input_ids: [B, L] int64, as `generate` takes them; their meaning does not matter.

        Raises:
            ValueError: if the draft has no forwards to time.
        """
        model, drafter = unwrapped(model), make_drafter(self.draft_model)
        check_calibration(drafter.model)
        self.meet(model)
        prompt = prepare(
            model, MAX_DRAFT_TOKENS + 1, {"inputs": input_ids, "attention_mask": torch.ones_like(input_ids)}
        )
        call = self._asked(Withheld(), prompt, drafter, None)
        stopping = Stopping(StoppingCriteriaList(), input_ids.shape[1], input_ids.shape[1] + MAX_DRAFT_TOKENS + 1)
        plan = make_plan(call, prompt, drafter, [])
        run = start(call, plan, prompt, input_ids, drafter, [], stopping, self.costs, None)
        run.target.read()
        drafter.read(run.reading)
        step = drafter.cost(run.batch)
        assert step is not None
        self.costs.measure(len(input_ids), partial(run.target.rehearse, run.batch), step)


def _width(prompt: Prompt) -> int:
    """Columns of the text so far, also if it is passed as embeddings, or only what a cache does not hold."""
    if prompt.model.config.is_encoder_decoder:
        return prompt.input_ids.shape[1]
    mask = prompt.kwargs.get("attention_mask")
    known = getattr(prompt.generation_config, "_mask_length", prompt.input_ids.shape[1])
    return known if mask is None else mask.shape[-1]
