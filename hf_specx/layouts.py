"""How rows of unequal length share one forward.

Ragged: every row keeps its tokens at the slots of their positions, a 4D mask by position hides the rest, and nothing
is ever moved. It needs a model that takes its positions from `position_ids` and its mask as given.
"""

import inspect

import torch
from transformers import PreTrainedModel

from .cache import RaggedCache
from .sequences import Sequences


LAYOUTS = ("auto", "ragged")
# Architectures on which the ragged layout is tested to equal stock generation (tests/test_layouts.py walks them).
RAGGED_MODEL_TYPES = frozenset(
    {
        "cohere",
        "gemma",
        "gemma2",
        "gpt2",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "olmo",
        "olmo2",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
RAGGED_ATTENTION = ("sdpa", "eager")


def choose_layout(model: PreTrainedModel, layout: str = "auto") -> tuple[str, str]:
    """The layout for a model and the reason for it.

    Raises:
        ValueError: where the model cannot be decoded exactly in this layout.
    """
    config = model.config.get_text_config()
    attention = config._attn_implementation
    if config.model_type not in RAGGED_MODEL_TYPES:
        raise ValueError(
            f"the ragged layout has not been shown to be exact for model type {config.model_type!r}, and it is the "
            f"only layout so far. Supported: {', '.join(sorted(RAGGED_MODEL_TYPES))}."
        )
    if attention not in RAGGED_ATTENTION:
        raise ValueError(
            f"the ragged layout needs a mask by position, which attn_implementation={attention!r} cannot take; load "
            f"the model with attn_implementation='sdpa'."
        )
    asked = "asked for" if layout == "ragged" else "chosen"
    return "ragged", f"{asked}: {config.model_type} takes positions and a 4D mask by position under {attention}"


def position_table(model: PreTrainedModel) -> int | None:
    """How many positions a learned table has; None where positions are computed."""
    config = model.config.get_text_config()
    return None if hasattr(config, "rope_parameters") else config.max_position_embeddings


class RaggedDecoder:
    """A model with its slots, fed the last tokens of each row of a `Sequences`."""

    def __init__(self, model: PreTrainedModel, max_positions: int, known_ids: int | None = None):
        """
        Args:
            model: any of `RAGGED_MODEL_TYPES`.
            max_positions: no real token lies at this position or behind it; positions of candidates that are past
                the end of their row are kept below it, since a learned table has no more.
            known_ids: ids from here on are fed as the last one below; a draft may lack what its target emits.
        """
        self.model, self.max_positions = model, max_positions
        config = model.config.get_text_config()
        self.cache = RaggedCache(config.num_hidden_layers)
        self.window: int | None = getattr(config, "sliding_window", None)
        self.layer_types: list[str] | None = getattr(config, "layer_types", None)
        self.known_ids = known_ids
        parameters = inspect.signature(model.forward).parameters
        self.keeps_logits = "logits_to_keep" in parameters
        hook = getattr(model, "_hf_hook", None)
        execution_device = getattr(hook, "execution_device", None)
        self.device = torch.device(execution_device if execution_device is not None else model.device)

    def __call__(self, sequences: Sequences, count: int, ahead: int, keep: int) -> torch.Tensor:
        """Feed the last tokens of each row; a token whose keys are stored already only writes them again.

        Args:
            sequences: the text, with candidates behind the ends of its R decoding rows.
            count: q, tokens fed a row.
            ahead: how many of them are candidates.
            keep: logits wanted for this many last tokens.

        Returns:
            logits [R, keep, V] in the model's dtype.
        """
        tokens = sequences.last(count, ahead)
        if self.known_ids is not None:
            tokens = tokens.clamp(max=self.known_ids - 1)
        lengths = sequences.lengths + ahead  # [R]
        host_lengths = sequences.host_lengths()
        longest, even = max(host_lengths) + ahead, len(set(host_lengths)) == 1
        return self.forward(tokens, lengths, longest, even and longest >= count, keep)

    def forward(
        self, tokens: torch.Tensor, lengths: torch.Tensor, longest: int, even: bool, keep: int
    ) -> torch.Tensor:
        """One forward of tokens [R, q] that end at lengths [R]; `even` where all these are equal to `longest`."""
        count = tokens.shape[1]
        positions = lengths[:, None] + torch.arange(-count, 0, device=lengths.device)  # [R, q], negative at pads
        start = longest - count if even else None
        home, tokens, positions = tokens.device, tokens.to(self.device), positions.to(self.device)
        self.cache.aim(positions, longest, start)
        kept = {"logits_to_keep": keep} if self.keeps_logits else {}
        output = self.model(
            input_ids=tokens,
            # the model's own causal mask is the right one where rows are even and there is no past
            attention_mask=None if start == 0 else self._mask(positions, longest),
            position_ids=positions.clamp(0, self.max_positions - 1),
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            **kept,
        )
        return output.logits[:, -keep:].to(home)

    def _mask(self, positions: torch.Tensor, extent: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [R, 1, q, extent] by position, one for each kind of layer where the model has several."""
        queries = positions.clamp(min=0)[:, None, :, None]  # a pad sees slot 0, so that no softmax is empty
        slots = torch.arange(extent, device=positions.device)
        full = slots <= queries
        if self.window is None:
            return self._additive(full) if self.layer_types is None else {"full_attention": self._additive(full)}
        sliding = self._additive(full & (slots > queries - self.window))
        if self.layer_types is None:
            return sliding
        return {"full_attention": self._additive(full), "sliding_attention": sliding}

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        dtype = self.model.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
            ~visible, torch.finfo(dtype).min
        )

    def select(self, places: torch.Tensor | None) -> None:
        """Keep only the rows at places [R']; all of them where None."""
        if places is not None:
            self.cache.select(places)
