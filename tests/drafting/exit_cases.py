"""What tests of early exits share: a target whose first layers predict, a call, and a count of forwards."""

from typing import Any

import torch
from counting import reads_only
from tiny import tiny
from transformers import PreTrainedModel

from hf_specx import EarlyExitDraft, SpeculativeDecoding
from hf_specx.drafting.early_exit import find_layers


NEW_TOKENS = 24
GREEDY = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
COUPLED = GREEDY | {"do_sample": True, "top_k": 10}


def target(model_type: str = "llama", **changes: Any) -> PreTrainedModel:
    """Its last layer changes about every third token."""
    depth = {"num_hidden_layers": 3} | ({"n_layer": 3} if model_type == "gpt2" else {})
    model = tiny(model_type, initializer_range=0.2, **depth | changes)
    for parameter in find_layers(model)[1][-1].parameters():
        parameter.data *= 0.5 if parameter.ndim > 1 else 1.0
    return model


def early_exit(draft: EarlyExitDraft | None = None, **options: Any) -> SpeculativeDecoding:
    """By default two layers draft."""
    options = {"num_draft_tokens": 3, "verification": "coupled"} | options
    return SpeculativeDecoding(draft or EarlyExitDraft(2), **options)


def run(model: PreTrainedModel, inputs: dict, strategy: SpeculativeDecoding | None = None, **settings: Any) -> Any:
    torch.manual_seed(4)
    return model.generate(**inputs, **COUPLED | settings, custom_generate=strategy)


class Fed:
    """Tokens of each row in every forward of the first and of the last layer."""

    def __init__(self, model: PreTrainedModel):
        self.first: list[int] = []
        self.last: list[int] = []
        layers = find_layers(model)[1]
        ends = (layers[0], self.first), (layers[-1], self.last)
        self.handles = [layer.register_forward_pre_hook(self._note(seen), with_kwargs=True) for layer, seen in ends]

    @staticmethod
    def _note(seen: list[int]):
        return reads_only(lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[1]))

    def assert_drafted(self) -> None:
        """The first layers took steps of their own, and all layers fewer than plain decoding."""
        assert len(self.last) < min(NEW_TOKENS, len(self.first))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for handle in self.handles:
            handle.remove()
