"""Inside what people put around `generate`: autocast, gradient modes, and errors at any moment."""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from all_pairs import all_pairs
from tiny import near, prompts, tiny
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specx import SpeculativeDecoding


GREEDY = {"do_sample": False, "max_new_tokens": 20}
MODELS = ("llama", "bart", "bamba")

pytestmark = pytest.mark.filterwarnings("ignore:in this batch all rows advance")


def coupled(draft: PreTrainedModel, **options: Any) -> SpeculativeDecoding:
    return SpeculativeDecoding(draft, num_draft_tokens=3, verification="coupled", **options)


def test_autocast():
    """One token and several at a time round differently in half precision, so the text may differ from stock's: it is
    the same in each call, and each token is the target's choice but for rounding."""
    target, inputs = tiny(), prompts(4)
    strategy, outputs = coupled(near(target, 0.05)), []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            outputs.append(target.generate(**inputs, **GREEDY, custom_generate=strategy))
        expected = target.generate(**inputs, **GREEDY | {"max_new_tokens": 1})
    assert torch.equal(*outputs)
    assert torch.equal(outputs[0][:, :12], expected)
    assert strategy.report.accepted > 0
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 20), value=1)
    with torch.no_grad():
        output = target(outputs[0], attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    logits = output.logits[:, 10:-1]  # in float32
    chosen = logits.gather(2, outputs[0][:, 11:, None])[..., 0]
    assert logits.std() > 2
    assert (logits.amax(-1) - chosen).max() < 0.3


@pytest.mark.usefixtures("draft_pays")
@pytest.mark.parametrize("num_draft_tokens", [3, "auto"])
def test_inference_mode_and_then_without(num_draft_tokens: int | str):
    """What a strategy keeps from one call serves the next; the gradient mode stays as it was."""
    target = tiny()
    expected = target.generate(**prompts(4), **GREEDY)
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=num_draft_tokens)
    with torch.inference_mode():
        assert torch.equal(target.generate(**prompts(4), **GREEDY, custom_generate=strategy), expected)
        assert torch.is_inference_mode_enabled()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            output = target.generate(**prompts(4), **GREEDY, custom_generate=strategy)
            assert torch.is_grad_enabled() == enabled
        assert torch.equal(output, expected)
        assert not output.is_inference()
        assert not output.requires_grad
    assert all(parameter.requires_grad and parameter.grad is None for parameter in target.parameters())
    strategy.calibrate(target, prompts(2)["input_ids"])


@cache
def models(name: str) -> dict[str, PreTrainedModel]:
    """In the three layouts that an error could leave something behind of."""
    target = tiny() if name == "llama" else zoo.build("seq2seq" if name == "bart" else "causal", name)
    return {"target": target, "draft": near(target, 0.05)}


def everything(both: dict[str, PreTrainedModel]) -> list[Any]:
    modules = [module for model in both.values() for module in model.modules()]
    weights = [weight.clone() for model in both.values() for weight in model.state_dict().values()]
    attributes = [
        {name: value for name, value in vars(module).items() if not name.startswith("_") or "hook" in name}
        for module in modules
    ]
    return [
        torch.cat([weight.flatten().double() for weight in weights]).tolist(),
        [
            (type(module), vars(module).keys(), repr(values))
            for module, values in zip(modules, attributes, strict=True)
        ],
        [(model.config.to_dict(), model.generation_config.to_dict()) for model in both.values()],
        [id(model.generation_config) for model in both.values()],
        dict(ALL_ATTENTION_FUNCTIONS),
        torch.is_grad_enabled(),
    ]


@contextlib.contextmanager
def failing(model: PreTrainedModel, moment: int, error: type[BaseException]) -> Iterator[list[int]]:
    """Raise an error at so many forwards, when the first layer has been computed."""
    calls: list[int] = []

    def fail(module: torch.nn.Module, args: Any, output: Any) -> None:
        calls.append(1)
        if len(calls) == moment:
            raise error("in the middle")

    handle = model.get_decoder().layers[0].register_forward_hook(fail)
    yield calls
    handle.remove()


@pytest.mark.parametrize(
    ("name", "who", "error", "moment"),
    all_pairs(MODELS, ["target", "draft"], [RuntimeError, KeyboardInterrupt], [1, 2, 5]),
)
def test_an_error_leaves_all_as_it_was(name: str, who: str, error: type[BaseException], moment: int):
    """In the prompt, in the first round, and later; the next call with the same strategy is right."""
    both = models(name)
    target, inputs = both["target"], prompts(3) if name == "llama" else zoo.inputs(both["target"])
    expected, strategy = target.generate(**inputs, **GREEDY), coupled(both["draft"])
    before = everything(both)
    with failing(both[who], moment, error) as calls, pytest.raises(error, match="in the middle"):
        target.generate(**inputs, **GREEDY, custom_generate=strategy)
    assert len(calls) == moment
    assert everything(both) == before
    assert torch.equal(target.generate(**inputs, **GREEDY, custom_generate=strategy), expected)
    assert everything(both) == before
