"""Bad input and misuse: one clear ValueError before any forward, naming the value and the remedy, nothing changed."""

from collections.abc import Callable

import pytest
import torch
from misuse import MODELS, Closing, call, call_of_1, full_window, function, get, two_tokens
from misuse_cases import CASES
from plain_cases import PLAIN
from tiny import near, prompts, tiny
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.models.slots import CACHE


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def forwards():
    """Forwards of whole models, encoders alone left out: transformers runs those before it calls anyone."""
    seen: list[str] = []

    def note(module, args):
        if isinstance(module, PreTrainedModel) and module.can_generate():
            seen.append(type(module).__name__)

    handle = register_module_forward_pre_hook(note)
    yield seen
    handle.remove()


def state() -> dict[str, tuple]:
    """What a call must leave alone in all models: mode, attributes, settings and weights."""
    return {name: state_of(get(name)) for name in MODELS}


def state_of(model: PreTrainedModel) -> tuple:
    names = {name for name in vars(model) if "cache" not in name}  # transformers may leave a static one there
    config = getattr(model, "generation_config", GenerationConfig())
    return model.training, names, config.to_dict(), [parameter._version for parameter in model.parameters()]


@pytest.mark.parametrize(("message", "misuse"), [*CASES.values(), *PLAIN], ids=[*CASES, *(case[0] for case in PLAIN)])
def test_misuse(message: str, misuse: Callable[[], object], forwards: list):
    full_window(), two_tokens()
    before, passed = state(), len(forwards)
    with pytest.raises(ValueError, match=message):
        misuse()
    assert len(forwards) == passed
    assert state() == before


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length(rope_type: str):
    """Within the original length it is the plain one and exact; after it, `generate` switches at another step."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"original_max_position_embeddings": 24, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    target = tiny(rope_parameters=rope, max_position_embeddings=24 if rope_type == "dynamic" else 48)
    settings = {"do_sample": False, "custom_generate": SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4)}
    expected = target.generate(**prompts(3), do_sample=False, max_new_tokens=13)
    assert torch.equal(target.generate(**prompts(3), **settings, max_new_tokens=13), expected)
    with pytest.raises(ValueError, match=f"rope_type='{rope_type}' changes its frequencies after position 24"):
        target.generate(**prompts(3), **settings, max_new_tokens=14)


def embedded(target: PreTrainedModel, inputs: dict) -> dict:
    return {"inputs_embeds": target.get_input_embeddings()(inputs["input_ids"]).detach()}


def continued(target: PreTrainedModel, inputs: dict) -> dict:
    """The last token alone, and a mask for all."""
    text = inputs | {"position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)}
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(**{name: value[:, :-1] for name, value in text.items()}, **{CACHE: cache})
    return {"input_ids": inputs["input_ids"][:, -1:], CACHE: cache}


@pytest.mark.parametrize("given", [embedded, continued])
def test_all_of_the_text_counts_in_its_length(given: Callable):
    """Not only what is passed as ids."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target, inputs = tiny(rope_parameters=rope, max_position_embeddings=24), prompts(3)
    settings = {"do_sample": False, "custom_generate": SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4)}
    call = settings | {"attention_mask": inputs["attention_mask"]}
    with pytest.raises(ValueError, match="changes its frequencies after position 24"):
        target.generate(**call, **given(target, inputs), max_new_tokens=14)
    expected = target.generate(**inputs, do_sample=False, max_new_tokens=13)[:, 11:]
    assert torch.equal(target.generate(**call, **given(target, inputs), max_new_tokens=13)[:, -13:], expected)


def test_a_refusal_ends_the_streamer():
    """Also where the streamer is what was refused: it was given the prompt already."""
    streamers = [Closing(), Closing(), Closing()]
    misuses = [
        lambda: call_of_1(streamer=streamers[0]),
        lambda: call({"streamer": streamers[1]}, use_cache=False),
        lambda: function(streamer=streamers[2], generation_config={}),
    ]
    for misuse, streamer in zip(misuses, streamers, strict=True):
        with pytest.raises(ValueError, match="."):
            misuse()
        assert streamer.ended
