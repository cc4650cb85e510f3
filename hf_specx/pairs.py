"""Draft-target pairs: two models and their one tokenizer, loaded and used together."""

import copy
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .checks import check_entry
from .generate import LOADER_OPTIONS, add_positional, ending, run, take_options
from .report import SpeculationReport
from .strategy import SpeculativeDecoding
from .wrappers import unwrapped


EMBEDDED = "embedded"


class DraftTargetPair:
    """A target with the draft that was made for it.

    Args:
        target: the model whose text is wanted.
        draft: a smaller model with the same vocabulary.
        tokenizer: of both; None if texts are tokenized elsewhere.
        config: facts about the pair, kept as given.

    Attributes:
        strategy: the `SpeculativeDecoding` whose options `generate` uses, by a copy for each call, so that several
            threads may call it; it remembers costs and acceptance.
        report: what the last `generate` to end did, None before the first.
        prompts: texts to try the pair with, [] if it came with none.

    Example:
        >>> pair = DraftTargetPair.embedded()
        >>> inputs = pair.tokenizer(["def main("], return_tensors="pt")
        >>> pair.tokenizer.batch_decode(pair.generate(**inputs, do_sample=True, max_new_tokens=32))
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: dict[str, Any] | None = None,
    ):
        self.target: PreTrainedModel = unwrapped(target)
        self.draft: PreTrainedModel = unwrapped(draft, adapters=True)
        check_entry(self.target, None)
        self.tokenizer, self.config = tokenizer, config or {}
        self.prompts: list[str] = self.config.get("prompts", [])
        self.strategy = self._strategy()
        self.report: SpeculationReport | None = None

    def _strategy(self, **options: Any) -> SpeculativeDecoding:
        return SpeculativeDecoding(
            self.draft, **{"tokenizer": self.tokenizer, "draft_tokenizer": self.tokenizer, **options}
        )

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, *, dtype: Any = "auto", **kwargs: Any) -> "DraftTargetPair":
        """Load a pair from a folder or repository with the subfolders `target` (tokenizer included) and `draft`.

        Args:
            name_or_path: a folder, a repository, or "embedded"; a local folder of that name comes first.
            dtype: of both models; "auto" is as they were saved.
            **kwargs: for `AutoModelForCausalLM.from_pretrained`.
        """
        if str(name_or_path) == EMBEDDED and not Path(EMBEDDED).is_dir():
            return cls.embedded(dtype=None if dtype == "auto" else dtype, **kwargs)
        shared = {name: kwargs[name] for name in LOADER_OPTIONS if name in kwargs}
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, subfolder="target", **shared)
        load = AutoModelForCausalLM.from_pretrained
        target, draft = (load(name_or_path, subfolder=part, dtype=dtype, **kwargs) for part in ("target", "draft"))
        return cls(target, draft, tokenizer)

    @classmethod
    def embedded(cls, dtype: torch.dtype | str | None = None, **kwargs: Any) -> "DraftTargetPair":
        """The pair in the package: 13.9M and 2.7M parameters, trained on the Python standard library's source.

        Args:
            dtype: float32 on the CPU and as saved (bfloat16) elsewhere, unless given.
            **kwargs: for `AutoModelForCausalLM.from_pretrained`.
        """
        folder = Path(str(files("hf_specx") / EMBEDDED))
        pair = cls.from_pretrained(folder, dtype="auto" if dtype is None else dtype, **kwargs)
        if dtype is None and pair.target.device.type == "cpu":
            pair.target.float()
            pair.draft.float()
        pair.prompts = json.loads((folder / "prompts.json").read_text())
        return pair

    def generate(self, inputs: torch.Tensor | None = None, *more: Any, **kwargs: Any) -> Any:
        """The target's `generate` with speculative sampling.

        Args:
            inputs: as in `generate`.
            *more: further positional arguments of the target's own `generate`.
            **kwargs: everything that `generate` takes, and the options of `SpeculativeDecoding` by keyword, for this
                call; what was learned of costs and acceptance is the pair's own all the same.
        """
        host = type(self.target)
        with ending(kwargs.get("streamer")) as reached:
            kwargs = add_positional(host, more, kwargs)
            own, options = self.strategy, take_options(kwargs)
            own.meet(self.target)
            strategy = self._strategy(**{"costs": own.costs} | options) if options else copy.copy(own)
            strategy.schedule = copy.copy(own.schedule)
            output = run(strategy, host, self.target, inputs, kwargs, reached)
        own.schedule, self.report = strategy.schedule, strategy.report
        return output
