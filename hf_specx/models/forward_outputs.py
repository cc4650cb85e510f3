"""What a target's forward of a round gives: logits, and hidden states for drafts that read them."""

import threading
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel


class Forward(NamedTuple):
    """What a target forward gave.

    Attributes:
        logits: [R, K + 1, V], after the last emitted token and after each candidate.
        hidden: [R, K + 1, H], the last layer's states at the same positions; None unless the drafter reads them.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class HiddenStates:
    """What some modules of a model give in its forwards: read by hooks, which are there inside of this context alone.

    With `output_hidden_states=True` a forward would keep the states of all layers. Forwards of other threads are not
    looked at.

    Args:
        modules: of the model, such as its decoder or some of the layers; with none, nothing is read.
    """

    def __init__(self, *modules: nn.Module):
        self.modules = modules
        self.states: dict[int, torch.Tensor] = {}  # of the last forward, by the number of the module: [R, q, H]

    def __enter__(self) -> None:
        self.states.clear()
        note, thread = self._note, threading.get_ident()
        self.hooks = [x.register_forward_hook(partial(note, n, thread)) for n, x in enumerate(self.modules)]

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _note(self, number: int, thread: int, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            self.states[number] = output if isinstance(output, torch.Tensor) else output[0]

    def last(self, count: int) -> torch.Tensor | None:
        """Those of the last `count` tokens that were fed, [R, count, H of all modules side by side]; None without."""
        if not self.states:
            return None
        return torch.cat([self.states[number][:, -count:] for number in range(len(self.modules))], -1)


def last_layer(model: PreTrainedModel) -> nn.Module:
    """The module of a model that gives the last layer's states, after the final norm."""
    return model.get_decoder() or model.base_model
