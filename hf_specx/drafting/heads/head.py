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
from .config import OF_BLOCKS, OF_EAGLE, HeadConfig
from .dflash2 import DFlash2
from .domino import Domino
from .driver import HeadDrafter
from .eagle import Eagle
from .medusa import Medusa
from .reading import read_head
from .tensors import check_tensors


class DraftHead(PreTrainedModel):
    """A few layers that draft from the target's hidden states: EAGLE-3, P-EAGLE, DFlash and its kin, or Medusa.

    It is a draft for `SpeculativeDecoding`, of the target that it was made for alone.

    Example:
        >>> head = DraftHead.from_pretrained("org/head", target=model)
        >>> model.generate(**inputs, max_new_tokens=128, custom_generate=SpeculativeDecoding(head))
    """

    config_class = HeadConfig
    base_model_prefix = "body"
    has_probs = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        kinds = (
            dict.fromkeys(OF_EAGLE, Eagle) | dict.fromkeys(OF_BLOCKS, Block) | {"dflash2": DFlash2, "domino": Domino}
        )
        self.body: Any = kinds.get(config.kind, Medusa)(config)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        if config.own_head and config.kind != "medusa":
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size != config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @classmethod
    def from_pretrained(cls, name: str | Path, *, target: PreTrainedModel, **loading: Any) -> "DraftHead":  # type: ignore[override]
        """Read a head from a folder or the Hub, whichever of the published formats it has.

        It is put where the target computes its logits, in the precision of its files.

        Args:
            name: a folder, or an id on the Hub.
            target: the model whose states it reads.
            **loading: see `read_head`.

        Raises:
            ValueError: the files are no head, or none for this target.
        """
        told = f"target is {kind(target)}; give the target itself, as from_pretrained loads it."
        require(hasattr(getattr(target, "config", None), "get_text_config"), told)
        config, tensors = read_head(name, target, **loading)
        with torch.device("meta"):
            head = cls(config)
        own = {key: key.removeprefix("body.") for key in head.state_dict()}  # and how files call each
        check_tensors(name, config.kind, {own[key]: tensor for key, tensor in head.state_dict().items()}, tensors)
        head.load_state_dict({key: tensors[theirs] for key, theirs in own.items()}, assign=True)
        head.name_or_path = str(name)
        return cast("DraftHead", head.requires_grad_(False).eval().to(last_device(target)))

    def save_pretrained(self, save_directory: str | Path, **saving: Any) -> None:  # type: ignore[override]
        """Write the head in the form of the *speculators* library, which vLLM serves."""
        tensors = {name.removeprefix("body."): tensor for name, tensor in self.state_dict().items()}
        super().save_pretrained(save_directory, state_dict=tensors, **saving)

    def bind(self, target: PreTrainedModel) -> HeadDrafter:
        """The drafter of one call."""
        config, output = self.config, getattr(self, "lm_head", None)
        require(not self.training, "the head is in training mode; call its eval().")
        sizes = config.target_hidden_size, config.vocab_size
        found = target.config.get_text_config(decoder=True).hidden_size, vocabulary(target)
        told = f"the head is for a target of width {sizes[0]} with {sizes[1]} tokens, and {type(target).__name__} has "
        require(sizes == found, f"{told}{found[0]} and {found[1]}; give a head that was made for this target.")
        embed: Any = getattr(self, "embed_tokens", None) or target.get_input_embeddings()
        if config.kind in ("dflash", "dflash2") and hasattr(embed, "embed_norm"):  # of Muse: they read the rows alone
            embed = nn.Embedding.from_pretrained(embed.weight)
        output = None if config.kind == "medusa" else output or target.get_output_embeddings()
        mask = getattr(self, "mask_embedding", None)
        return HeadDrafter(self.body, embed, output, self.ids, self.hidden_state_taps(target), self, mask)

    @property
    def ids(self) -> torch.Tensor | None:
        """[V_d], the target's ids of the head's tokens; None if they are the same."""
        offsets = getattr(self, "d2t", None)
        return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets

    def get_output_embeddings(self) -> None:
        """None that scores all tokens, as that of a model does."""

    def hidden_state_taps(self, target: PreTrainedModel) -> list[HiddenStateTap]:
        """Where in the target its states are: what goes into a layer, or comes out of the last one."""
        if self.config.kind == "medusa":
            return []
        layers, ids = find_layers(target, "a draft head for")[1], self.config.layer_ids
        told = f"the head reads the state behind layer {max(ids)}, and {type(target).__name__} has {len(layers)}; "
        require(max(ids) <= len(layers), f"{told}give a head that was made for this target.")
        return [(layers[number], True) if number < len(layers) else (layers[-1], False) for number in ids]

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        raise NotImplementedError  # what `of` returns does
