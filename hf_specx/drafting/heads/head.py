"""`DraftHead`: a published draft head with its weights, for one target."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specx.common.batch import Batch
from hf_specx.common.devices import last_device
from hf_specx.common.errors import kind, require
from hf_specx.common.round import Draft
from hf_specx.common.wrappers import vocabulary
from hf_specx.drafting.early_exit import find_layers
from hf_specx.models.prompts import HiddenStateTap

from .block import Block
from .config import HeadConfig
from .dflash2 import DFlash2
from .domino import Domino
from .eagle import Eagle
from .formats import read_head
from .head_drafter import HeadDrafter
from .medusa import Medusa
from .tensors import check_tensors


NETWORKS: dict[str, Any] = {  # by kind of head
    "eagle3": Eagle,
    "peagle": Eagle,
    "dflash": Block,
    "dspark": Block,
    "dflash2": DFlash2,
    "domino": Domino,
    "medusa": Medusa,
}


class DraftHead(PreTrainedModel):
    """A few layers that draft from the target's hidden states: EAGLE-3, P-EAGLE, DFlash and its kin, or Medusa.

    It is a draft for `SpeculativeDecoding`, of the target that it was made for alone.

    Example:
        >>> head = DraftHead.from_pretrained("org/head", target=model)
        >>> model.generate(**inputs, max_new_tokens=128, custom_generate=SpeculativeDecoding(head))
    """

    config_class = HeadConfig
    base_model_prefix = "network"
    has_probs = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        self.network: Any = NETWORKS[config.kind](config)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        if config.own_head and not self.network.gives_logits:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size != config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @classmethod
    def from_pretrained(cls, name: str | Path, *, target: PreTrainedModel, **loading: Any) -> "DraftHead":  # type: ignore[override]
        """Load a head from a folder or the Hub, whichever of the published formats it has.

        It is put where the target computes its logits, in the precision of its files.

        Args:
            name: a folder, or an id on the Hub.
            target: the model whose states it reads.
            **loading: see `read_head`.

        Raises:
            ValueError: the files are no head, or none for this target.
        """
        require(
            hasattr(getattr(target, "config", None), "get_text_config"),
            f"target is {kind(target)}; give the target itself, as from_pretrained loads it.",
        )
        config, tensors = read_head(name, target, **loading)
        with torch.device("meta"):
            head = cls(config)
        names_in_files = {key: key.removeprefix("network.") for key in head.state_dict()}
        expected = {names_in_files[key]: tensor for key, tensor in head.state_dict().items()}
        check_tensors(name, config.kind, expected, tensors)
        head.load_state_dict({key: tensors[in_files] for key, in_files in names_in_files.items()}, assign=True)
        head.name_or_path = str(name)
        return cast("DraftHead", head.requires_grad_(False).eval().to(last_device(target)))

    def save_pretrained(self, save_directory: str | Path, **saving: Any) -> None:  # type: ignore[override]
        """Write the head in the form of the *speculators* library, which vLLM serves."""
        tensors = {name.removeprefix("network."): tensor for name, tensor in self.state_dict().items()}
        super().save_pretrained(save_directory, state_dict=tensors, **saving)

    def bind(self, target: PreTrainedModel) -> HeadDrafter:
        """The drafter of one call; raises ValueError if the head is for another target, or in training mode."""
        config = self.config
        require(not self.training, "the head is in training mode; call its eval().")
        width, tokens = target.config.get_text_config(decoder=True).hidden_size, vocabulary(target)
        require(
            (config.target_hidden_size, config.vocab_size) == (width, tokens),
            f"the head is for a target of width {config.target_hidden_size} with {config.vocab_size} tokens, and "
            f"{type(target).__name__} has {width} and {tokens}; give a head that was made for this target.",
        )
        embedding: Any = getattr(self, "embed_tokens", None) or target.get_input_embeddings()
        # Muse norms what it embeds; these heads were trained on the rows of its table as they are
        if config.kind in ("dflash", "dflash2") and hasattr(embedding, "embed_norm"):
            embedding = nn.Embedding.from_pretrained(embedding.weight)
        output = None
        if not self.network.gives_logits:
            output = getattr(self, "lm_head", None) or target.get_output_embeddings()
        mask = getattr(self, "mask_embedding", None)
        return HeadDrafter(self.network, embedding, output, self.ids, self.hidden_state_taps(target), self, mask)

    @property
    def ids(self) -> torch.Tensor | None:
        """[V_d], the target's ids of the head's tokens; None if they are the same."""
        offsets = getattr(self, "d2t", None)
        return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets

    def get_output_embeddings(self) -> None:
        """None, since a head may score a part of the target's tokens, or have the target's output score its states."""

    def hidden_state_taps(self, target: PreTrainedModel) -> list[HiddenStateTap]:
        """Where in the target the head reads states: the input of a layer, or the output of the last one.

        None of these are behind the target's final norm.
        """
        if self.network.reads_final_states:
            return []
        layers, ids = find_layers(target, "a draft head for")[1], self.config.layer_ids
        require(
            max(ids) <= len(layers),
            f"the head reads the state behind layer {max(ids)}, and {type(target).__name__} has {len(layers)}; give a "
            "head that was made for this target.",
        )
        return [(layers[number], True) if number < len(layers) else (layers[-1], False) for number in ids]

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        raise NotImplementedError  # what `bind` returns does
