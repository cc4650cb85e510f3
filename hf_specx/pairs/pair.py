"""Draft-target pairs: two models and a tokenizer that are loaded, used and saved together."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from hf_specx.common.devices import execution_device
from hf_specx.common.drafts import DRAFT_FOLDER
from hf_specx.common.errors import kind, require
from hf_specx.common.wrappers import NoModel, label_of, unwrapped, unwrapped_draft
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.heads.draft_names import with_loaded_drafts, with_weightless_drafts
from hf_specx.engine.check_arguments import check_entry, check_pair_call
from hf_specx.engine.report import SpeculationReport
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.hub.find_draft import recommended
from hf_specx.hub.known_pairs import embedded_folder
from hf_specx.hub.pair_config import ModelSource, PairConfig, WeightlessDraft
from hf_specx.hub.publish import publish, save

from .complete import complete as complete_texts
from .generate import (
    STRATEGY_OPTIONS,
    EndStreamerOnError,
    add_positional,
    call_generate,
    check_before_loading,
    pop_options,
)
from .loading import embedded_dtype, load_pair


PairDraft = PreTrainedModel | WeightlessDraft | list[PreTrainedModel | WeightlessDraft]


class DraftTargetPair(NoModel):
    """A target model and a draft model for it.

    Args:
        target: the model whose text is wanted.
        draft: a smaller model, a `DraftHead`, a `SuffixDraft`, an `EarlyExitDraft`, the name of one, or a list of
            these.
        tokenizer: of both models, or the target's; None if texts are tokenized elsewhere.
        config: facts about the pair, its recommended options and measurements; None for none.
        draft_tokenizer: the draft's, where it has another one than the target.
        processor: of the target's sounds or images, to be saved with the pair. `from_pretrained` does not load it:
            assign what `AutoProcessor.from_pretrained` gives.

    Attributes:
        strategy: the `SpeculativeDecoding` with the options of `generate`, and with the costs and acceptance that it
            has learned. Each call uses a copy, so that several threads may call `generate`.
        report: of the last `generate` that ended; None before the first.
        draft_tokenizer: the draft's own, where it has another one; else `tokenizer`.
        sources: by role ("target", "draft"), where on the Hub a model was loaded from; None if it was not.
        cache_dir: where their files are kept, if not where they usually are.

    Raises:
        ValueError: the target cannot generate.

    Example:
        >>> pair = DraftTargetPair.embedded()
        >>> inputs = pair.tokenizer(["def main("], return_tensors="pt")
        >>> pair.tokenizer.batch_decode(pair.generate(**inputs, do_sample=True, max_new_tokens=32))
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PairDraft | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: PairConfig | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
    ):
        self._target: PreTrainedModel = unwrapped(target)
        check_entry(self._target)
        require(
            config is None or isinstance(config, PairConfig),
            f"config is {kind(config)}; pass a PairConfig, and a tokenizer of the draft as draft_tokenizer=.",
        )
        require(
            not isinstance(tokenizer, ProcessorMixin),
            f"tokenizer is {kind(tokenizer)}; pass its .tokenizer, and itself as processor=.",
        )
        self._draft: PairDraft = unwrapped_draft(with_loaded_drafts(with_weightless_drafts(draft), self._target))
        self.tokenizer, self.processor = tokenizer, processor
        self.draft_tokenizer = tokenizer if draft_tokenizer is None else draft_tokenizer
        self.config = config or PairConfig(ModelSource(), ModelSource(subfolder=DRAFT_FOLDER))
        self.sources: dict[str, ModelSource | None] = {"target": None, "draft": None}
        self.cache_dir: str | Path | None = None
        self.strategy = self._strategy()
        self.report: SpeculationReport | None = None

    def __repr__(self) -> str:
        draft = " + ".join(map(label_of, self.drafts))
        return f"DraftTargetPair(target={label_of(self.target)}, draft={draft})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError: a pair given as custom_generate= would otherwise be ignored by transformers."""
        raise ValueError("a pair is no function; call pair.generate(...), or pass custom_generate=pair.strategy.")

    @property
    def target(self) -> PreTrainedModel:
        """The target; it cannot be replaced, make another pair instead."""
        return self._target

    @property
    def draft(self) -> PairDraft:
        """The draft; it cannot be replaced, make another pair instead."""
        return self._draft

    @property
    def drafts(self) -> list[PreTrainedModel | WeightlessDraft]:
        """The draft, or all of several."""
        return self.draft if isinstance(self.draft, list) else [self.draft]

    @property
    def models(self) -> list[PreTrainedModel]:
        """The target, and the draft if it is a model, or that among several drafts."""
        models = [draft for draft in self.drafts if isinstance(draft, PreTrainedModel) and draft.can_generate()]
        return [self.target, *models]

    @property
    def prompts(self) -> list[str]:
        """Texts to try the pair with; [] if its config has none."""
        return self.config.prompts

    @property
    def device(self) -> torch.device:
        """The device of the target's inputs."""
        return execution_device(self.target)

    def to(self, device: torch.device | str) -> "DraftTargetPair":
        """Move both models, and start with what was measured on that hardware, if anything was; returns the pair."""
        for part in (*self.models, *self.drafts):
            module = getattr(part, "head", None) if isinstance(part, EarlyExitDraft) else part
            if isinstance(module, torch.nn.Module):
                module.to(device)
        self.strategy = self._strategy()
        return self

    def _strategy(self) -> SpeculativeDecoding:
        """A strategy with the options that the config recommends."""
        options, costs = recommended(self.config, self.target)
        options |= {"tokenizer": self.tokenizer, "draft_tokenizer": self.draft_tokenizer, "costs": costs}
        return SpeculativeDecoding(self.draft, **options)

    from_pretrained = classmethod(load_pair)

    @classmethod
    def embedded(cls, dtype: torch.dtype | str | None = None, **kwargs: Any) -> "DraftTargetPair":
        """The pair in the package: 13.9M parameters and a head of 2.2M, trained on Python's standard library.

        Args:
            dtype: None or "auto" is float32 on the CPU, and as saved (bfloat16) on an accelerator.
            **kwargs: of `from_pretrained`. With `draft=embedded_folder() / "draft"` a model of 2.7M drafts, not the
                head.
        """
        dtype = embedded_dtype(dtype, kwargs.get("device_map"))
        return cls.from_pretrained(embedded_folder(), dtype=dtype, **kwargs)

    complete = complete_texts
    save_pretrained = save
    push_to_hub = publish

    def generate(self, inputs: torch.Tensor | None = None, *more: Any, **kwargs: Any) -> Any:
        """The target's `generate` with speculative sampling.

        Args:
            inputs: as in `generate`; tensors are moved to the device of the target's inputs.
            *more: further positional arguments of the target's own `generate`.
            **kwargs: everything that `generate` takes, and for this call any option of `SpeculativeDecoding`. What
                is learned of costs and acceptance is kept for later calls in any case.
        """
        model_class, device = type(self.target), execution_device(self.target)
        with EndStreamerOnError(kwargs.get("streamer")) as streamer_end:
            check_pair_call(kwargs | {"inputs": inputs})
            kwargs = add_positional(model_class, more, kwargs | {"inputs": inputs})
            kwargs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
            inputs = kwargs.pop("inputs")
            check_before_loading(inputs, self.target, kwargs)
            strategy = self.strategy_for(kwargs)
            output = call_generate(strategy, model_class, self.target, inputs, kwargs, streamer_end)
        self.report = strategy.report
        return output

    def strategy_for(self, kwargs: dict[str, Any]) -> SpeculativeDecoding:
        """A copy of the pair's strategy for one call, with its options, which are taken out of its arguments."""
        options = pop_options(kwargs)
        pair_strategy = self.strategy
        pair_strategy.reset_costs_for(self.target)
        if options:
            pair_options = {name: getattr(pair_strategy, name) for name in STRATEGY_OPTIONS}
            strategy = SpeculativeDecoding(pair_strategy.draft_model, **pair_options | options)
        else:
            strategy = copy.copy(pair_strategy)
        strategy.listeners, strategy._warned = pair_strategy.listeners, pair_strategy._warned
        strategy.report = None  # of this call alone, whatever the pair's strategy has decoded
        return strategy
