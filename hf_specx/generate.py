"""The entry: check what was asked for, bind what transformers withholds from callables, run the loop."""

import sys
import time
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
from .checks import check_call, check_options, check_pair, check_withheld
from .decode import decode
from .layouts import RaggedDecoder, choose_layout
from .lookahead import MAX_DRAFT_TOKENS, PRIOR_ALPHA, Costs, synchronize
from .noise import CoupledRule, GreedyRule, RejectionRule, Rule
from .processors import Processors
from .report import SpeculationReport
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
        draft_model: a model with the target's vocabulary, or any `CandidateGenerator`.
        num_draft_tokens: candidates a round; "auto" takes the number with the best `forward_limited_speedup`, by a
            cost table that is measured before the first token of the first call at each batch size.
        verification: "block" (the default for a model), "token", or "coupled" (the default for a
            `CandidateGenerator`), which gives the tokens of stock sampling under the same `torch.manual_seed`.
        layout: how rows of unequal length share a batch; "auto" or "ragged".
        compile: must be False in this version.
        streamer: gets the prompt and then each run of tokens as it is emitted; for one row.
        tokenizer: the target's, and `draft_tokenizer` the draft's: with both, vocabularies are compared token by token
            and may differ in padding; otherwise they must be equally large.
        costs: a table from an earlier strategy (`strategy.costs`).

    Attributes:
        report: the `SpeculationReport` of the last call, None before the first.
        costs: the cost table.
        alpha: acceptance in the calls so far, which "auto" goes by.

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
        if not isinstance(draft_model, PreTrainedModel | CandidateGenerator):
            raise ValueError(f"draft_model is a {type(draft_model).__name__}; give a model or a CandidateGenerator.")
        is_model = isinstance(draft_model, PreTrainedModel)
        check_options(num_draft_tokens, verification, layout, compile, unknown, is_model)
        self.draft_model, self.num_draft_tokens, self.layout = draft_model, num_draft_tokens, layout
        self.verification = verification or ("block" if is_model else "coupled")
        self.streamer, self.tokenizer, self.draft_tokenizer = streamer, tokenizer, draft_tokenizer
        self.costs = costs if costs is not None else Costs()
        self.alpha = PRIOR_ALPHA
        self.report: SpeculationReport | None = None

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
        mode = self.verification if generation_config.do_sample else "greedy"
        check_call(input_ids, generation_config, model_kwargs, mode, self.streamer is not None)
        if isinstance(self.draft_model, PreTrainedModel):
            check_pair(model, self.draft_model, self.tokenizer, self.draft_tokenizer)
            choose_layout(self.draft_model, self.layout)
        layout, reason = choose_layout(model, self.layout)
        processors = Processors(logits_processor)
        stopping = Stopping(stopping_criteria, input_ids.shape[1], generation_config.max_length)
        try:
            if self.streamer is not None:
                self.streamer.put(input_ids.cpu())
            wanted = self._choose_num_draft_tokens(model, input_ids)
            report = self.report = SpeculationReport(mode, layout, reason, len(input_ids), costs=self.costs)
            pad = generation_config._pad_token_tensor
            sequences = Sequences(input_ids, model_kwargs.get("attention_mask"), 0 if pad is None else int(pad))
            rule = self._rule(mode, input_ids, wanted)
            target = RaggedDecoder(model, generation_config.max_length)
            drafter = self._drafter(model, processors, rule, generation_config.max_length)
            started = time.perf_counter()
            output = decode(target, drafter, rule, processors, stopping, sequences, wanted, report, self.streamer)
            report.finish(time.perf_counter() - started, stopping.columns)
        finally:
            if self.streamer is not None:
                self.streamer.end()
        self._remember(report)
        if generation_config.return_dict_in_generate:
            return SpeculativeOutput(sequences=output, speculation_report=report)  # type: ignore[arg-type]
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

    def _choose_num_draft_tokens(self, model: PreTrainedModel, input_ids: torch.Tensor) -> int:
        if self.num_draft_tokens != "auto":
            return int(self.num_draft_tokens)
        if isinstance(self.draft_model, CandidateGenerator):
            return FOREIGN_DRAFT_TOKENS
        if len(input_ids) not in self.costs.table:
            self.calibrate(model, input_ids)
        return self.costs.best_num_draft_tokens(len(input_ids), self.alpha)

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, input_ids: torch.Tensor) -> None:
        """Time bare forwards of both models at this batch and length, and note them in `costs`.

        Args:
            model: the target.
            input_ids: [B, L] int64; only the shape and the device matter.
        """
        if not isinstance(self.draft_model, PreTrainedModel):
            raise ValueError("a CandidateGenerator has no forward to time; give num_draft_tokens as a number.")
        steps = []
        for timed in (model, self.draft_model):
            decoder = RaggedDecoder(timed, input_ids.shape[1] + MAX_DRAFT_TOKENS + 1)
            steps.append(_bare_step(decoder, input_ids))
        self.costs.measure(len(input_ids), *steps)

    def _remember(self, report: SpeculationReport) -> None:
        if report.judged:
            weight = report.judged / (report.judged + 100)
            self.alpha += weight * (report.alpha - self.alpha)


def _bare_step(decoder: RaggedDecoder, input_ids: torch.Tensor) -> Callable[[int], None]:
    """A forward of q tokens a row behind a cache of L, as a function of q; what it stores is not used."""
    batch, length = input_ids.shape

    def step(query_length: int) -> None:
        tokens = input_ids[:, -1:].expand(batch, query_length)
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
    if kwargs.get("stop_strings") is not None:
        if tokenizer is None:
            raise ValueError(f"stop_strings={kwargs['stop_strings']!r} needs the tokenizer; pass tokenizer=.")
        criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
        kwargs["stopping_criteria"] = [*criteria, StopStringCriteria(tokenizer, kwargs.pop("stop_strings"))]
        kwargs["stopping_criteria"] = StoppingCriteriaList(kwargs["stopping_criteria"])
    strategy = SpeculativeDecoding(
        draft_model if draft_model is not None else assistant_model,
        streamer=kwargs.pop("streamer", None),
        tokenizer=tokenizer,
        draft_tokenizer=options.pop("draft_tokenizer", kwargs.pop("assistant_tokenizer", None)),
        **options,
    )
    return type(model).generate(model, inputs, custom_generate=strategy, **kwargs)  # type: ignore[attr-defined]
