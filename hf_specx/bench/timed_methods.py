"""Methods to generate that can be called and timed; their names are those of `decoding_methods`."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.devices import execution_device
from hf_specx.common.errors import require
from hf_specx.common.wrappers import vocabulary
from hf_specx.drafting.candidates import make_drafter
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.engine.report import SpeculationReport
from hf_specx.engine.strategy import SpeculativeDecoding

from .decoding_methods import (
    ASSISTED_NAME,
    EXIT_NAME,
    LOOKUP_NAME,
    OUR_KINDS,
    PLAIN_NAME,
    VERIFIERS,
    DecodingMethod,
    parse_method,
)
from .inputs import Inputs


class TimedMethod:
    """A target with one method to generate, which is called like a function.

    Args:
        name: as `parse_method` reads it; any other for a strategy.
        target, draft: of the pair, a model or a head; what drafts without one needs no draft.
        strategy: ours, in place of the one that the name says.
        tokenizers: the target's and the draft's, where these are not the same.
        early_exit: the pair's own, which may have a head; taken for its number of layers.

    Raises:
        ValueError: for a name that means nothing, or that needs a draft model where there is none.
    """

    def __init__(
        self,
        name: str,
        target: PreTrainedModel,
        draft: PreTrainedModel | None = None,
        strategy: SpeculativeDecoding | None = None,
        tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None,
        early_exit: EarlyExitDraft | None = None,
    ):
        self.name, self.target, self.draft, self.tokenizers = name, target, draft, tokenizers
        if strategy is None:
            self.method = parse_method(name)
        else:
            self.method = DecodingMethod("strategy", compiled=strategy.compile)
        self.compiled = self.method.compiled
        is_assisted = self.method.kind == ASSISTED_NAME
        needs_model = is_assisted or self.method.kind in (*VERIFIERS, "several")
        if needs_model and self.method.exit_layer is None:
            serves = draft is not None and (not is_assisted or draft.can_generate())  # a head of ours cannot
            require(serves, f"{name} needs a draft model, and this pair has none.")
        # one strategy for all calls, since it remembers costs and acceptance
        self.strategy = self._make_strategy(early_exit) if self.method.kind in OUR_KINDS else strategy

    def _make_strategy(self, early_exit: EarlyExitDraft | None) -> SpeculativeDecoding:
        """The strategy that the method's name says."""
        kind, num_draft_tokens, compiled, exit_layer, tree = self.method
        draft: Any = self.draft
        if kind == "suffix":
            draft = SuffixDraft()
        elif kind == "several":
            draft = [SuffixDraft(), self.draft]
        elif exit_layer is not None:
            is_the_pairs = early_exit is not None and early_exit.exit_layer == exit_layer
            draft = early_exit if is_the_pairs else EarlyExitDraft(exit_layer)
        tokenizer = draft_tokenizer = None
        if self.tokenizers is not None and kind not in ("suffix", EXIT_NAME):
            tokenizer, draft_tokenizer = self.tokenizers
        return SpeculativeDecoding(
            draft,
            num_draft_tokens=num_draft_tokens or "auto",
            verification=kind if kind in VERIFIERS else None,
            compile=compiled,
            tree=tree,
            tokenizer=tokenizer,
            draft_tokenizer=draft_tokenizer,
        )

    @property
    def report(self) -> SpeculationReport | None:
        """The report of the last call; None of a method of transformers."""
        return None if self.strategy is None else self.strategy.report

    def __call__(self, inputs: Inputs, options: dict[str, Any]) -> torch.Tensor:
        """Generate: [B, L + N] int64."""
        generate: Any = self.target.generate
        settings: Any = nullcontext()
        if self.method.kind == ASSISTED_NAME:
            drafting = self.target
            if self.draft is not None and self.method.exit_layer is None:
                drafting = self.draft
            settings = assisted_settings(drafting, self.method.num_draft_tokens)
        with settings:
            output = generate(**inputs, **options, **self._arguments(options))
        if self.compiled and self.strategy is None and getattr(self.target, "_compiled_call", None) is None:
            raise RuntimeError("transformers has not compiled the forward of this model.")
        return output

    def _arguments(self, options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `generate` for this method, besides inputs and options."""
        kind, num_draft_tokens, compiled, exit_layer, _ = self.method
        if self.strategy is not None:
            return {"custom_generate": self.strategy}
        if kind == PLAIN_NAME and compiled:  # with graphs on an accelerator, as transformers itself compiles
            on_cpu = execution_device(self.target).type == "cpu"
            config = CompileConfig(mode="default" if on_cpu else "reduce-overhead", dynamic=False)
            config._compile_all_devices = True  # type: ignore[assignment]  # else on accelerators alone
            return {"cache_implementation": "static", "compile_config": config}
        if kind == PLAIN_NAME:
            return {}
        if kind == LOOKUP_NAME:
            return {"prompt_lookup_num_tokens": num_draft_tokens}
        if exit_layer is not None:
            return {"assistant_early_exit": exit_layer}
        if self.tokenizers is None:
            assert self.draft is not None
            scored, of_target = vocabulary(self.draft), vocabulary(self.target)
            require(
                scored == of_target,
                f"the draft scores {scored} tokens and the target {of_target}, which transformers takes for two "
                "tokenizers.",
            )
            return {"assistant_model": self.draft}
        require(
            not options.get("do_sample"),
            "with another tokenizer transformers samples from wrong probabilities and leaves its own head in the "
            "draft; compare with it greedily.",
        )
        tokenizer, assistant_tokenizer = self.tokenizers
        return {"assistant_model": self.draft, "tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}

    def prepare(self, inputs: Inputs) -> None:
        """Time the forwards of both models for the report's `forward_limited_speedup`, unless they are compiled.

        Compiling each size for this alone would take minutes.
        """
        if self.strategy is None or self.compiled or self.strategy.costs.knows(len(inputs["input_ids"])):
            return
        if self.strategy.num_draft_tokens == 0:  # it decodes plainly
            return
        if make_drafter(self.strategy.draft_model, self.target).model is not None:
            self.strategy.calibrate(self.target, inputs["input_ids"])


@contextmanager
def assisted_settings(draft: PreTrainedModel, num_draft_tokens: int | str | None) -> Iterator[None]:
    """A context in which assisted generation drafts so many candidates in every round; None changes nothing.

    transformers reads them from the draft alone, and changes some of them while it generates.
    """
    original: Any = draft.generation_config
    config: Any = draft.base_model.config
    layers = getattr(config, "num_hidden_layers", None)  # which an early exit lowers, and leaves so after an error
    draft.generation_config = copy.deepcopy(original)
    if num_draft_tokens is not None:
        draft.generation_config.num_assistant_tokens = num_draft_tokens
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
    try:
        yield
    finally:
        draft.generation_config = original
        if getattr(config, "num_hidden_layers", None) != layers:
            config.num_hidden_layers = layers
