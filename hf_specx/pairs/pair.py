"""Draft-target pairs: two models and their one tokenizer, loaded, used and saved together."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.devices import execution_device, hardware
from hf_specx.common.wrappers import unwrapped
from hf_specx.engine.report import SpeculationReport
from hf_specx.generate import add_positional, ending, run, take_options
from hf_specx.hub.known_pairs import embedded_folder, is_embedded
from hf_specx.hub.publish import publish
from hf_specx.hub.saving import save
from hf_specx.pair_files.pair_config import ModelSource, PairConfig
from hf_specx.strategy import SpeculativeDecoding
from hf_specx.validation.entry import check_entry, check_pair_call

from .loading import LoadedPair, load_pair
from .shares import complete


class DraftTargetPair:
    """A target with the draft that was made for it.

    Args:
        target: the model whose text is wanted.
        draft: a smaller model with the same vocabulary.
        tokenizer: of both; None if texts are tokenized elsewhere.
        config: facts about the pair, its recommended options and measurements.

    Attributes:
        strategy: the `SpeculativeDecoding` whose options `generate` uses, by a copy for each call, so that several
            threads may call it; it remembers costs and acceptance.
        report: what the last `generate` to end did, None before the first.
        draft_tokenizer: the draft's own, if it was loaded from elsewhere.
        sources: where each model was loaded from on the Hub, by role.

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
        config: PairConfig | None = None,
    ):
        self._target: PreTrainedModel = unwrapped(target)
        self._draft: PreTrainedModel = unwrapped(draft, adapters=True)
        check_entry(self.target, None)
        self.tokenizer = self.draft_tokenizer = tokenizer
        self.config = config or PairConfig(ModelSource(), ModelSource(subfolder="draft"))
        self.sources: dict[str, ModelSource | None] = {"target": None, "draft": None}
        self.strategy = self._strategy()
        self.report: SpeculationReport | None = None

    @property
    def target(self) -> PreTrainedModel:
        """The target; a pair with another one is another pair."""
        return self._target

    @property
    def draft(self) -> PreTrainedModel:
        """The draft; a pair with another one is another pair."""
        return self._draft

    @property
    def prompts(self) -> list[str]:
        """Texts to try the pair with, [] if it came with none."""
        return self.config.prompts

    def _strategy(self, **options: Any) -> SpeculativeDecoding:
        config, dtype = self.config, str(self.target.dtype).removeprefix("torch.")
        own = {name: getattr(config, name) for name in ("num_draft_tokens", "verification", "layout")}
        own |= {"costs": config.costs_on(hardware(execution_device(self.target)), dtype)}
        tokenizers = {"tokenizer": self.tokenizer, "draft_tokenizer": self.draft_tokenizer}
        return SpeculativeDecoding(self.draft, **tokenizers | own | options)

    @classmethod
    def from_loaded(cls, loaded: LoadedPair) -> "DraftTargetPair":
        """A pair of parts that were loaded already."""
        pair = cls(loaded.target, loaded.draft, loaded.tokenizer, loaded.config)
        pair.sources = loaded.sources
        if loaded.draft_tokenizer is not None:
            pair.draft_tokenizer = loaded.draft_tokenizer
            pair.strategy = pair._strategy()
        return pair

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **kwargs: Any) -> "DraftTargetPair":
        """Load a pair: `from_pretrained("org/pair", device_map="auto", dtype="auto", revision=..., token=...)`.

        Args:
            name_or_path: a folder, an id on the Hub, or "embedded"; a local folder of that name comes first.
            **kwargs: of `load_pair`, where they are described.

        Raises:
            ValueError: for anything in the pair's files that is not as it should be, before it is loaded.
        """
        if is_embedded(str(name_or_path)):
            return cls.embedded(**kwargs)
        return cls.from_loaded(load_pair(name_or_path, **kwargs))

    @classmethod
    def embedded(cls, dtype: torch.dtype | str | None = None, **kwargs: Any) -> "DraftTargetPair":
        """The pair in the package: 13.9M and 2.7M parameters, trained on the Python standard library's source.

        Args:
            dtype: unless given, or "auto": float32 on the CPU, and as saved (bfloat16) on an accelerator.
            **kwargs: of `load_pair`.
        """
        if dtype in (None, "auto"):
            spread = kwargs.get("device_map") not in (None, "cpu") and torch.accelerator.is_available()
            dtype = "auto" if spread else torch.float32
        return cls.from_loaded(load_pair(embedded_folder(), dtype=dtype, **kwargs))

    def complete(self, texts: Sequence[str], *, batch_size: int = 8, seed: int = 0, **options: Any) -> list[str]:
        """Continue texts in batches; under `accelerate launch` each process takes a share, as `shares.complete` says.

        Args:
            texts: prompts.
            batch_size: rows of a batch.
            seed: the prompt at place i samples under `seed + i`.
            **options: for `generate`.

        Returns:
            What was generated for each text, in order, on every process.
        """
        return complete(self, texts, batch_size=batch_size, seed=seed, **options)

    def save_pretrained(
        self, folder: str | Path, *, target: str = "inside", draft: str = "inside", overwrite: bool = False
    ) -> None:
        """Write the pair into a folder, whole or not at all; in safetensors, with the target at its root.

        Args:
            folder: not there yet, or empty.
            target, draft: "inside", or "reference" to where on the Hub it was loaded from, at that commit.
            overwrite: whether to replace a folder, with all that is in it.

        Raises:
            ValueError: for a folder that is in use, and for a reference to a model that is not from the Hub.
        """
        save(self, folder, target=target, draft=draft, overwrite=overwrite)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Publish the pair with its card and the code to use it without this package; see `hub.publish`.

        Args:
            repo_id: "owner/name".
            **kwargs: of `publish`.

        Returns:
            The commit.
        """
        return publish(self, repo_id, **kwargs)

    def generate(self, inputs: torch.Tensor | None = None, *more: Any, **kwargs: Any) -> Any:
        """The target's `generate` with speculative sampling.

        Args:
            inputs: as in `generate`; tensors are moved to where the target takes them.
            *more: further positional arguments of the target's own `generate`.
            **kwargs: everything that `generate` takes, and the options of `SpeculativeDecoding` by keyword, for this
                call; what was learned of costs and acceptance is the pair's own all the same.
        """
        host, device = type(self.target), execution_device(self.target)
        with ending(kwargs.get("streamer")) as reached:
            check_pair_call(kwargs)
            kwargs = add_positional(host, more, kwargs | {"inputs": inputs})
            kwargs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
            own, options = self.strategy, take_options(kwargs)
            own.meet(self.target)
            strategy = self._strategy(**{"costs": own.costs} | options) if options else copy.copy(own)
            strategy.schedule = own.schedule
            output = run(strategy, host, self.target, kwargs.pop("inputs"), kwargs, reached)
        own.schedule, self.report = strategy.schedule, strategy.report
        return output
