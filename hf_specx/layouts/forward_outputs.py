"""What forwards give besides logits: hidden states and attentions of the tokens that they were fed, layer by layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from hf_specx.cache.slots import windows_of


EXTRAS = {"output_hidden_states", "output_attentions"}
Layers = tuple[torch.Tensor | None, ...] | None
Change = Callable[[torch.Tensor], torch.Tensor]


class Forward(NamedTuple):
    """What a target forward gave.

    Attributes:
        logits: [R, K + 1, V], after the last emitted token and after each candidate.
        hidden: [R, K + 1, H], the last layer's states at the same positions; None unless the drafter reads them.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class Extras(NamedTuple):
    """Hidden states and attentions of a forward, layer by layer.

    A kind is None if the call does not want it or the model does not give it; so is a layer that gives none.

    Attributes:
        hidden_states: of each layer [R, q, ...].
        attentions: of each layer [R, heads, q, S].
        cross_attentions: of each layer [R, heads, q, S'].
    """

    hidden_states: Layers = None
    attentions: Layers = None
    cross_attentions: Layers = None

    def each(self, states: Change, weights: Change) -> "Extras":
        """The same with `states` applied to the hidden states of each layer, and `weights` to its attentions."""
        return Extras(
            *(_each(change, layers) for change, layers in zip((states, weights, weights), self, strict=True))
        )


class Seen:
    """The extras of a forward over R rows, and the slots that its tokens attend to."""

    def __init__(
        self,
        extras: Extras,
        own: torch.Tensor,
        extent: int,
        fed: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ):
        """
        Args:
            extras: of the forward.
            own: [R, P] int64, the slots of the P tokens that can be asked for.
            extent: how many leading slots a layer may see; one that sees fewer sees the last of these.
            fed: [R, P], the indices of these tokens among the q that were fed; the last P if None.
            slots: [R, n], the slots of each row's tokens if they are not consecutive; `own` then indexes into it.
        """
        self.extras, self.own, self.extent, self.fed, self.slots = extras, own, extent, fed, slots

    def states(self, layer: torch.Tensor, index: torch.Tensor, position: torch.Tensor, count: int) -> torch.Tensor:
        """The hidden states of N tokens.

        Args:
            layer: [R, q, ...] of one layer.
            index: [N], their row indices.
            position: [N], which of the row's P tokens each is.
            count: how many tokens are wanted, the last of which is this one.

        Returns:
            [N, count, ...], with the count - 1 tokens before each; zeros where there is none.
        """
        fed = layer.shape[1] - self.own.shape[1] + position if self.fed is None else self.fed[index, position]
        fed = _back(fed, count).to(layer.device)  # [N, count]
        found = layer[index.to(layer.device)[:, None], fed.clamp(min=0)]
        return found.masked_fill(fed.view(*fed.shape, *[1] * (layer.ndim - 2)) < 0, 0)

    def weights(
        self, layer: torch.Tensor, index: torch.Tensor, position: torch.Tensor, count: int, columns: int | None
    ) -> torch.Tensor:
        """The attentions of N tokens; arguments as in `states`, with a layer [R, heads, q, S].

        Args:
            columns: to how many of the row's last columns, up to the token's own; to all keys if None.

        Returns:
            [N, heads, count, columns]
        """
        found = self.states(layer.transpose(1, 2), index, position, count).transpose(1, 2)  # [N, heads, count, S]
        if columns is None:
            return found
        keys = _back(self.own[index, position], columns)  # [N, columns]
        if self.slots is not None:
            slots = self.slots[index.to(self.slots.device)[:, None], keys.clamp(min=0)]
            keys = slots.masked_fill(keys < 0, -1)
        keys = (keys - (self.extent - layer.shape[3])).to(layer.device)[:, None, None]
        return found.gather(3, keys.clamp(min=0).expand(*found.shape[:3], -1)).masked_fill(keys < 0, 0)


class Notes:
    """What the forwards of one model gave besides logits, if its call wants it.

    Attributes:
        asked: arguments that make a forward give it; empty if nothing is wanted.
        first: extras of the whole prompts [B, L], in the columns of `generate`.
        seen: those of the last forward after the prompts.
        reads_all: whether `generate` feeds this model the whole text at each step.
    """

    def __init__(
        self, config: PreTrainedConfig, asked: dict[str, Any], cache: Cache | None, gives_hidden: bool = False
    ):
        """
        Args:
            config: the model's.
            asked: the arguments of the call that are in `EXTRAS`.
            cache: as `generate` made it.
            gives_hidden: whether `last_hidden` will be asked for.
        """
        self.config, self.reads_all, self.gives_hidden = config, False, gives_hidden
        self.asked = asked | {"output_hidden_states": True} if gives_hidden else asked
        self.first: Extras | None = None
        self.seen: Seen | None = None
        kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
        self.windows = windows_of(cache, kinds) if asked and cache is not None else []

    def of(self, output: Any) -> Extras:
        """What the call wants of the output of a forward."""
        side, given = "decoder_" if self.config.is_encoder_decoder else "", Extras()
        if "output_hidden_states" in self.asked:
            given = given._replace(hidden_states=getattr(output, f"{side}hidden_states", None))
        if "output_attentions" in self.asked:
            crossed = getattr(output, "cross_attentions", None) if side else None
            given = given._replace(attentions=getattr(output, f"{side}attentions", None), cross_attentions=crossed)
        return given.each(_copies_last, _as_it_is) if has_copies(self.config) else given

    def note_first(self, output: Any) -> None:
        """Keep what the prompts gave."""
        if not self.asked:
            return
        given = self.of(output)
        if given.attentions is not None:  # `generate` shows a chunk of a prompt no more than a window before it
            layers = len(given.attentions)
            columns = [
                x if x is None else x[..., -self.visible(number, layers, x.shape[3], x.shape[2]) :]
                for number, x in enumerate(given.attentions)
            ]
            given = given._replace(attentions=tuple(columns))
        self.first = given

    def note(self, output: Any, own: torch.Tensor, extent: int, fed: torch.Tensor | None = None) -> None:
        """Keep what a later forward gave; see `Seen` for the arguments."""
        if self.asked:
            self.seen = Seen(self.of(output), own, extent, fed)

    def last_hidden(self, first: bool = False) -> torch.Tensor | None:
        """The last layer's states at the positions whose logits were kept: [R, P, H]; None unless they are wanted.

        Args:
            first: whether after the prompts, with P = 1, instead of in the last forward.
        """
        given = self.first if first else getattr(self.seen, "extras", None)
        if not self.gives_hidden or given is None or not given.hidden_states or given.hidden_states[-1] is None:
            return None
        last = given.hidden_states[-1]
        if first or self.seen is None:
            return last[:, -1:]
        if self.seen.fed is None:
            return last[:, -self.seen.own.shape[1] :]
        return last[torch.arange(len(last), device=last.device)[:, None], self.seen.fed.to(last.device)]

    def visible(self, layer: int, layers: int, columns: int, queries: int = 1) -> int:
        """How many columns of a text an attention layer sees in `generate`; 0 if it sees no text.

        Args:
            layer: its number among the layers that give attentions.
            layers: how many there are.
            columns: of the text up to the last token that attends.
            queries: tokens that attend.
        """
        config = self.config.get_text_config(decoder=True)
        if layer in image_layers(config) and layers == config.num_hidden_layers:  # without images these are left out
            return 0
        window = self.windows[layer] if layer < len(self.windows) else None
        return columns if window is None else min(window - 1 + queries, columns)


def image_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Numbers of the layers that attend to images instead of the text."""
    return tuple(getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ())


def has_copies(config: PreTrainedConfig) -> bool:
    """Whether layers give hidden states [copies, R, q, H], as Gemma 3n's do."""
    return hasattr(config.get_text_config(decoder=True), "altup_num_inputs")


def copies_first(states: torch.Tensor) -> torch.Tensor:
    """Hidden states [R, q, copies, H] as such a model gave them."""
    return states.movedim(2, 0) if states.ndim == 4 else states


def _copies_last(states: torch.Tensor) -> torch.Tensor:
    return states.movedim(0, 2) if states.ndim == 4 else states


def _as_it_is(weights: torch.Tensor) -> torch.Tensor:
    return weights


def _each(change: Change, layers: Layers) -> Layers:
    return None if layers is None else tuple(None if layer is None else change(layer) for layer in layers)


def _back(last: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` consecutive numbers up to last [N]: [N, count]."""
    return last[:, None] + torch.arange(1 - count, 1, device=last.device)
