"""The strategy: check what was asked for, choose layouts and the number of candidates, run the loop."""

import copy
import sys
import time
import warnings
import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import ModelOutput

from .cache import has_columns
from .candidates import Drafter, ForeignCandidateGenerator, SampledCandidateGenerator
from .checks import check_call, check_options, check_pair, check_target, check_withheld
from .decode import decode
from .decoders import Decoder, Prompt, vocabulary
from .layouts import choose_layout, layouts_of, make_decoder
from .lookahead import MAX_DRAFT_TOKENS, Costs
from .processors import Processors
from .prompts import draft_prompt, prepare
from .report import SpeculationReport
from .rules import CoupledRule, GreedyRule, RejectionRule, Rule
from .sequences import Sequences
from .stopping import Stopping


NOISE_WINDOW = 4  # rounds whose shared noise is held
FOREIGN_DRAFT_TOKENS = 5  # "auto" for a CandidateGenerator, whose cost is not known
LOCKSTEP_COST = (
    "all rows advance by the batch minimum, which costs the more rounds the larger the batch, since nothing better "
    "has been shown to be exact here; layout='lockstep' says that this is wanted."
)
NOT_FILLED = (
    "past_key_values= was not filled with this text: its rows ended at different steps in lockstep, or the model is "
    "an encoder-decoder or keeps no cache; pass the whole text without it in the next turn."
)


class Call(NamedTuple):
    """What one call of `generate` asks of the text."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList


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
        layout: how rows of unequal length share a batch: "ragged", "padded", "packed" or "lockstep"; "auto" takes the
            best one that was shown to be exact for the architecture.
        compile: must be False in this version.
        streamer: gets the prompt and then each run of tokens as it is emitted; for one row.
        tokenizer: the target's, and `draft_tokenizer` the draft's: with both, vocabularies are compared token by token
            and may differ in padding; otherwise they must be equally large.
        costs: of an earlier strategy (`strategy.costs`), so that this one drafts the same numbers.

    Attributes:
        report: the `SpeculationReport` of the last call, None before the first.
        adds_reports: whether `report` is the sum over all calls; `hf_specx.generate` wants that of Whisper's windows.
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
        self.adds_reports = False
        self._warned = False
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
        **model_kwargs: Any,
    ) -> torch.Tensor | ModelOutput:
        """What `GenerationMixin.generate` calls after its preparations; see there for the arguments.

        Returns:
            [B, L + N] int64, or with `return_dict_in_generate=True` what stock returns, the report being its attribute
            `speculation_report`.

        Raises:
            ValueError: before any forward, for what cannot be done exactly.
        """
        check_withheld(sys._getframe(2))  # 1 is torch.no_grad's wrapper
        room = generation_config.max_length - input_ids.shape[1]
        user_cache = model_kwargs.get("past_key_values")
        given = getattr(user_cache, "_is_user_defined", False)
        wanted = generation_config.return_dict_in_generate or given
        keeps_past = bool(wanted and not model.config.is_encoder_decoder)
        if given:
            model_kwargs["past_key_values"] = copy.deepcopy(user_cache)  # it is changed once all went well
        prompt = Prompt(model, input_ids, generation_config, model_kwargs, room, keeps_past)
        try:
            output, past = self._run(prompt, inputs_tensor, Call(logits_processor, stopping_criteria))
        finally:
            if self.streamer is not None:
                self.streamer.end()
        if user_cache is not None and given:
            if past is None:
                warnings.warn(NOT_FILLED, UserWarning, stacklevel=2)
            else:
                user_cache.layers[:] = past.layers
                past = user_cache
        if not generation_config.return_dict_in_generate:
            return output
        decodes = model.config.is_encoder_decoder
        result = (GenerateEncoderDecoderOutput if decodes else GenerateDecoderOnlyOutput)(
            sequences=output,  # type: ignore[arg-type]
            past_key_values=past,
        )
        result.speculation_report = self.report  # no item, as Whisper takes each of these apart by row
        return result

    def _run(
        self, prompt: Prompt, inputs_tensor: torch.Tensor | None, call: Call
    ) -> tuple[torch.Tensor, Cache | None]:
        model, input_ids, config = prompt.model, prompt.input_ids, prompt.generation_config
        mode = self.verification if config.do_sample else "greedy"
        check_target(model, config.max_length)
        check_call(input_ids, config, prompt.kwargs, mode, self.streamer is not None)
        if isinstance(self.draft_model, PreTrainedModel):
            check_pair(model, self.draft_model, self.tokenizer, self.draft_tokenizer)
        layout, reason, draft_layout = self._layouts(prompt)
        stopping = Stopping(call.criteria, input_ids.shape[1], config.max_length)
        processors = Processors(call.processors, stopping.eos_token_id)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        sequences = _sequences(prompt)
        started = time.perf_counter()
        target, draft = make_decoder(layout, prompt), None
        if isinstance(self.draft_model, PreTrainedModel):
            own = draft_prompt(self.draft_model, prompt, inputs_tensor)
            draft = make_decoder(draft_layout, own, vocabulary(self.draft_model))
        target.read()
        rule = self._rule(mode, input_ids)  # takes the generator as stock has it here, whatever the draft may draw
        if draft is not None:
            draft.read()
        wanted = self._choose_num_draft_tokens(sequences, target, draft, mode)
        if isinstance(rule, CoupledRule):
            rule.noise.window = NOISE_WINDOW * (wanted + 1)
        report = SpeculationReport(mode, layout, reason, len(input_ids), costs=self.costs)
        earlier, self.report = self.report if self.adds_reports else None, report
        drafter: Drafter
        if isinstance(self.draft_model, CandidateGenerator):
            drafter = ForeignCandidateGenerator(self.draft_model)
        else:
            size = target.after_prompt.shape[-1]
            drafter = SampledCandidateGenerator(self.draft_model, processors, rule, size, decoder=draft)
        lockstep = "lockstep" in (layout, draft_layout)
        output = decode(
            target, drafter, rule, processors, stopping, sequences, wanted, report, self.streamer, lockstep
        )
        report.finish(time.perf_counter() - started, stopping.columns)
        self.costs.remember(mode, report.alpha, report.judged)
        if earlier is not None:
            self.report = earlier + report
        return output, target.past(sequences, stopping.columns) if prompt.keeps_past else None

    def _layouts(self, prompt: Prompt) -> tuple[str, str, str]:
        """The target's layout, the reason for it, and the draft's layout."""
        layout, reason = choose_layout(prompt.model, self.layout)
        past = prompt.kwargs.get("past_key_values")
        if layout != "lockstep" and past is not None and not has_columns(past):
            if self.layout != "auto":
                raise ValueError(
                    f"layout={layout!r} needs the keys of all tokens, and past_key_values= does not have them (a "
                    "window drops some); use layout='auto' or leave past_key_values out."
                )
            layout, reason = "lockstep", "chosen: past_key_values= does not have the keys of all tokens"
        draft_layout = layout
        if isinstance(self.draft_model, PreTrainedModel):
            able = layouts_of(self.draft_model, drafts=True)
            draft_layout = layout if layout in able else able[0]
        if self.layout == "auto" and len(prompt.input_ids) > 1 and "lockstep" in (layout, draft_layout):
            self._warn_once()
        return layout, reason, draft_layout

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(LOCKSTEP_COST, UserWarning, stacklevel=2)

    def _rule(self, mode: str, input_ids: torch.Tensor) -> Rule:
        if mode == "greedy":
            return GreedyRule()
        if mode == "coupled":
            return CoupledRule(len(input_ids), input_ids.device, window=0)
        return RejectionRule(mode == "block", input_ids.device)

    def _choose_num_draft_tokens(self, sequences: Sequences, target: Decoder, draft: Decoder | None, mode: str) -> int:
        if self._served is not None and self._served() is not target.model:
            self.costs = Costs()  # what was learned on another target says nothing about this one
        self._served = weakref.ref(target.model)
        if self.num_draft_tokens != "auto":
            return int(self.num_draft_tokens)
        if draft is None:
            return FOREIGN_DRAFT_TOKENS
        if len(sequences.rows) not in self.costs.table:
            self._measure(sequences, target, draft)
        return self.costs.best_num_draft_tokens(len(sequences.rows), mode)

    def _measure(self, sequences: Sequences, target: Decoder, draft: Decoder) -> None:
        rehearse = [partial(decoder.rehearse, sequences) for decoder in (target, draft)]
        self.costs.measure(len(sequences.rows), *rehearse)

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, input_ids: torch.Tensor) -> None:
        """Time bare forwards of both models at this batch and length, and note them in `costs`.

        Args:
            model: the target.
            input_ids: [B, L] int64, as `generate` takes them; their meaning does not matter.

        Raises:
            ValueError: if the draft is a `CandidateGenerator`.
        """
        if not isinstance(self.draft_model, PreTrainedModel):
            raise ValueError("a CandidateGenerator has no forward to time; give num_draft_tokens as a number.")
        given = {"inputs": input_ids, "attention_mask": torch.ones_like(input_ids)}
        prompt = prepare(model, MAX_DRAFT_TOKENS + 1, given)
        layout, _, draft_layout = self._layouts(prompt)
        target = make_decoder(layout, prompt)
        draft = make_decoder(draft_layout, draft_prompt(self.draft_model, prompt, input_ids))
        target.read()
        draft.read()
        self._measure(_sequences(prompt), target, draft)


def _sequences(prompt: Prompt) -> Sequences:
    decodes = prompt.model.config.is_encoder_decoder
    mask = prompt.kwargs.get("decoder_attention_mask" if decodes else "attention_mask")
    pad = prompt.generation_config._pad_token_tensor
    width = prompt.input_ids.shape[1]
    mask = None if mask is None or width == 0 else mask[:, -width:]
    return Sequences(prompt.input_ids, mask, 0 if pad is None else int(pad))
