"""The entry: check what was asked for, bind what transformers withholds from callables, run the loop."""

import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from .candidates import Drafter, ForeignCandidateGenerator, SampledCandidateGenerator
from .checks import check_call, check_options, check_pair, check_target, check_withheld
from .decode import decode
from .layouts import RaggedDecoder, choose_layout, position_table
from .lookahead import MAX_DRAFT_TOKENS, Costs, synchronize
from .processors import Processors
from .report import SpeculationReport
from .rules import CoupledRule, GreedyRule, RejectionRule, Rule
from .sequences import Sequences
from .stopping import Stopping


NOISE_WINDOW = 4  # rounds whose shared noise is held
FOREIGN_DRAFT_TOKENS = 5  # "auto" for a CandidateGenerator, whose cost is not known
STRATEGY_OPTIONS = ("num_draft_tokens", "verification", "layout", "compile", "draft_tokenizer", "costs")
LOADER_OPTIONS = (
    "revision",
    "token",
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "repo_type",
    "trust_remote_code",
    "custom_generate",
)


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with what the call did."""

    speculation_report: SpeculationReport | None = None


class SpeculativeDecoding:
    """Speculative sampling for `model.generate(..., custom_generate=strategy)`.

    With `do_sample=False` the verifier is greedy whatever `verification` says. The strategy may serve many calls; it
    remembers costs and acceptance from one to the next.

    Args:
        draft_model: a model with the target's vocabulary, or a `CandidateGenerator` that goes by the text alone.
        num_draft_tokens: candidates a round; "auto" takes the number with the best `forward_limited_speedup`, by a
            cost table that is measured before the first token of the first call at each batch size.
        verification: "block" (the default for a model), "token", or "coupled" (the default for a
            `CandidateGenerator`), which gives the tokens of stock sampling under the same `torch.manual_seed`.
        layout: how rows of unequal length share a batch; "auto" or "ragged".
        compile: must be False in this version.
        streamer: gets the prompt and then each run of tokens as it is emitted; for one row.
        tokenizer: the target's, and `draft_tokenizer` the draft's: with both, vocabularies are compared token by token
            and may differ in padding; otherwise they must be equally large.
        costs: of an earlier strategy (`strategy.costs`), so that this one drafts the same numbers.

    Attributes:
        report: the `SpeculationReport` of the last call, None before the first.
        costs: what "auto" goes by: times of bare forwards, and acceptance in the calls so far. Started anew when the
            strategy is used with another target.

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
            "tokenizer": tokenizer,
            "draft_tokenizer": draft_tokenizer,
            "costs": costs,
        }
        check_options(options, unknown, draft_model)
        self.draft_model, self.num_draft_tokens, self.layout = draft_model, num_draft_tokens, layout
        self.verification = verification or ("block" if isinstance(draft_model, PreTrainedModel) else "coupled")
        self.streamer, self.tokenizer, self.draft_tokenizer = streamer, tokenizer, draft_tokenizer
        self.costs = costs if costs is not None else Costs()
        self.report: SpeculationReport | None = None
        self._served: weakref.ref[PreTrainedModel] | None = None

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor | SpeculativeOutput:
        """What `GenerationMixin.generate` calls after its preparations; see there for the arguments.

        Returns:
            [B, L + N] int64, or a `SpeculativeOutput` with `return_dict_in_generate=True`.

        Raises:
            ValueError: before any forward, for what cannot be done exactly.
        """
        check_withheld(sys._getframe(2))  # 1 is torch.no_grad's wrapper
        try:
            output = self._run(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        finally:
            if self.streamer is not None:
                self.streamer.end()
        if generation_config.return_dict_in_generate:
            return SpeculativeOutput(sequences=output, speculation_report=self.report)  # type: ignore[arg-type]
        return output

    def _run(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> torch.Tensor:
        mode = self.verification if generation_config.do_sample else "greedy"
        check_target(model, generation_config.max_length)
        check_call(input_ids, generation_config, model_kwargs, mode, self.streamer is not None)
        if isinstance(self.draft_model, PreTrainedModel):
            check_pair(model, self.draft_model, self.tokenizer, self.draft_tokenizer)
            choose_layout(self.draft_model, self.layout)
        layout, reason = choose_layout(model, self.layout)
        stopping = Stopping(stopping_criteria, input_ids.shape[1], generation_config.max_length)
        processors = Processors(logits_processor, stopping.eos_token_id)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        wanted = self._choose_num_draft_tokens(model, input_ids, mode)
        report = self.report = SpeculationReport(mode, layout, reason, len(input_ids), costs=self.costs)
        pad = generation_config._pad_token_tensor
        sequences = Sequences(input_ids, model_kwargs.get("attention_mask"), 0 if pad is None else int(pad))
        rule = self._rule(mode, input_ids, wanted)
        target = RaggedDecoder(model, generation_config.max_length)
        drafter = self._drafter(model, processors, rule, generation_config.max_length)
        started = time.perf_counter()
        output = decode(target, drafter, rule, processors, stopping, sequences, wanted, report, self.streamer)
        report.finish(time.perf_counter() - started, stopping.columns)
        self.costs.remember(mode, report.alpha, report.judged)
        return output

    def _rule(self, mode: str, input_ids: torch.Tensor, num_draft_tokens: int) -> Rule:
        if mode == "greedy":
            return GreedyRule()
        if mode == "coupled":
            return CoupledRule(len(input_ids), input_ids.device, window=NOISE_WINDOW * (num_draft_tokens + 1))
        return RejectionRule(mode == "block", input_ids.device)

    def _drafter(self, model: PreTrainedModel, processors: Processors, rule: Rule, max_length: int) -> Drafter:
        if isinstance(self.draft_model, CandidateGenerator):
            return ForeignCandidateGenerator(self.draft_model)
        vocab_size = model.config.get_text_config().vocab_size
        return SampledCandidateGenerator(self.draft_model, processors, rule, max_length, vocab_size)

    def _choose_num_draft_tokens(self, model: PreTrainedModel, input_ids: torch.Tensor, mode: str) -> int:
        if self._served is not None and self._served() is not model:
            self.costs = Costs()  # what was learned on another target says nothing about this one
        self._served = weakref.ref(model)
        if self.num_draft_tokens != "auto":
            return int(self.num_draft_tokens)
        if isinstance(self.draft_model, CandidateGenerator):
            return FOREIGN_DRAFT_TOKENS
        if len(input_ids) not in self.costs.table:
            self.calibrate(model, input_ids)
        return self.costs.best_num_draft_tokens(len(input_ids), mode)

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, input_ids: torch.Tensor) -> None:
        """Time bare forwards of both models at this batch and length, and note them in `costs`.

        Args:
            model: the target.
            input_ids: [B, L] int64; only the shape and the device matter.

        Raises:
            ValueError: if the draft is a `CandidateGenerator`.
        """
        if not isinstance(self.draft_model, PreTrainedModel):
            raise ValueError("a CandidateGenerator has no forward to time; give num_draft_tokens as a number.")
        self.costs.measure(len(input_ids), _bare_step(model, input_ids), _bare_step(self.draft_model, input_ids))


def _bare_step(model: PreTrainedModel, input_ids: torch.Tensor) -> Callable[[int], None]:
    """A forward of q tokens a row behind a cache of L, as a function of q; what it stores is not used."""
    batch, length = input_ids.shape
    decoder = RaggedDecoder(model, position_table(model) or length + MAX_DRAFT_TOKENS + 1)

    def step(query_length: int) -> None:
        tokens = torch.zeros(batch, query_length, dtype=torch.int64, device=input_ids.device)
        lengths = torch.full((batch,), length + query_length, device=input_ids.device)
        decoder.forward(tokens, lengths, length + query_length, True, query_length)
        synchronize(decoder.device)

    return step


def generate(inputs: torch.Tensor | None = None, *, model: PreTrainedModel, **kwargs: Any) -> Any:
    """`model.generate` with speculative sampling, for what transformers withholds from a strategy object.

    Args:
        inputs: as in `generate`.
        model: the target.
        **kwargs: everything that `generate` takes, and every option of `SpeculativeDecoding` by keyword; the draft as
            `draft_model` or `assistant_model`.

    Returns:
        As `generate`.

    Raises:
        ValueError: where no draft is given, and as `SpeculativeDecoding`.
    """
    for name in LOADER_OPTIONS:
        kwargs.pop(name, None)
    draft_model = kwargs.pop("draft_model", None)
    assistant_model = kwargs.pop("assistant_model", None)
    if draft_model is None and assistant_model is None:
        raise ValueError("no draft: pass draft_model= or assistant_model=.")
    if kwargs.pop("synced_gpus", None):
        raise ValueError("synced_gpus=True is not available with speculative decoding in this version; leave it out.")
    options = {name: kwargs.pop(name) for name in STRATEGY_OPTIONS if name in kwargs}
    tokenizer = kwargs.pop("tokenizer", None)
    bind_stop_strings(model, tokenizer, kwargs)
    strategy = SpeculativeDecoding(
        draft_model if draft_model is not None else assistant_model,
        streamer=kwargs.pop("streamer", None),
        tokenizer=tokenizer,
        draft_tokenizer=options.pop("draft_tokenizer", kwargs.pop("assistant_tokenizer", None)),
        **options,
    )
    return type(model).generate(model, inputs, custom_generate=strategy, **kwargs)  # type: ignore[attr-defined]


def bind_stop_strings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, kwargs: dict[str, Any]
) -> None:
    """Turn stop strings among the arguments of `generate` into a criterion: it withholds the tokenizer they need."""
    given = [kwargs, vars(kwargs.get("generation_config") or model.generation_config)]
    strings = next((found for source in given if (found := source.get("stop_strings")) is not None), None)
    if strings is None:
        return
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r} needs the tokenizer; pass tokenizer=.")
    criteria = [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, strings)]
    kwargs |= {"stopping_criteria": StoppingCriteriaList(criteria), "stop_strings": None}
