"""Bad input and misuse: one clear error before any forward, naming the value and the remedy, nothing changed."""

import warnings
from collections.abc import Callable

import pytest
import torch
import zoo
from all_pairs import all_pairs
from counting import reads_only
from misuse import MODELS, PLAIN, WRONG_TEXT, full_window, get, two_tokens
from tiny import near, prompts, tiny
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.models.slots import CACHE


CASES = [*WRONG_TEXT, *PLAIN]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def forwards():
    """Forwards of whole models, encoders alone left out: transformers runs those before it calls anyone."""
    seen: list[str] = []

    def note(module, args):
        if isinstance(module, PreTrainedModel) and module.can_generate():
            seen.append(type(module).__name__)

    handle = register_module_forward_pre_hook(reads_only(note))
    yield seen
    handle.remove()


@pytest.fixture(scope="module")
def before() -> dict[str, tuple]:
    full_window(), two_tokens()
    return state()


def state() -> dict[str, tuple]:
    """What a call must leave alone in all models: mode, attributes, settings and weights."""
    return {name: state_of(get(name)) for name in MODELS}


def state_of(model: PreTrainedModel) -> tuple:
    names = {name for name in vars(model) if "cache" not in name}  # transformers may leave a static one there
    config = getattr(model, "generation_config", GenerationConfig())
    return model.training, names, config.to_dict(), [parameter._version for parameter in model.parameters()]


def test_a_strategy_in_the_place_of_a_generation_config(forwards: list):
    """As the second argument of `generate`."""
    with pytest.raises(AttributeError, match="is no GenerationConfig; give a strategy by its name, as custom_gen"):
        get("target").generate(prompts(2)["input_ids"], SpeculativeDecoding(get("draft")))
    assert not forwards


@pytest.mark.parametrize(("message", "misuse"), CASES, ids=[message for message, _ in CASES])
def test_misuse(message: str, misuse: Callable[[], object], before: dict, forwards: list):
    with pytest.raises((ValueError, TypeError), match=message):
        misuse()
    assert not forwards
    assert state() == before


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 24}
    | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}


def whole(target: PreTrainedModel, inputs: dict) -> dict:
    return inputs


def embedded(target: PreTrainedModel, inputs: dict) -> dict:
    return {"inputs_embeds": target.get_input_embeddings()(inputs["input_ids"]).detach()}


def continued(target: PreTrainedModel, inputs: dict) -> dict:
    """The last token alone, and a mask for all."""
    text = inputs | {"position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)}
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(**{name: value[:, :-1] for name, value in text.items()}, **{CACHE: cache})
    return {"input_ids": inputs["input_ids"][:, -1:], CACHE: cache}


def test_keys_that_are_left_out_by_rounding():
    target, call = zoo.build("causal", "doge"), prompts(1) | {"do_sample": False, "pad_token_id": 0}
    target.config.keep_window_size = 24
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4)
    expected = target.generate(**call, max_new_tokens=13)
    assert torch.equal(target.generate(**call, max_new_tokens=13, custom_generate=strategy), expected)
    assert strategy.report.accepted > 0
    longer = target.generate(**call, max_new_tokens=14)
    with pytest.warns(UserWarning, match=r"longer than keep_window_size=24, .*there may be 25 tokens"):
        assert torch.equal(target.generate(**call, max_new_tokens=14, custom_generate=strategy), longer)


@pytest.mark.parametrize(
    ("rope_type", "inputs_of"),
    [("dynamic", whole), ("longrope", whole), ("dynamic", embedded), ("dynamic", continued)],
)
def test_rope_that_depends_on_the_length(rope_type: str, inputs_of: Callable):
    """Within the original length it is the plain one and speculated; beyond it, `generate` switches at another step.

    All of the text counts in its length, not only what is passed as ids.
    """
    most = 24 if rope_type == "dynamic" else 48
    target = tiny(rope_parameters=ROPES[rope_type] | {"rope_theta": 1e4}, max_position_embeddings=most)
    inputs = prompts(3)
    call = {"do_sample": False, "attention_mask": inputs["attention_mask"]}
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4)
    ours = call | {"custom_generate": strategy}
    expected = target.generate(input_ids=inputs["input_ids"], **call, max_new_tokens=13)[:, 11:]
    assert torch.equal(target.generate(**inputs_of(target, inputs) | ours, max_new_tokens=13)[:, -13:], expected)
    assert strategy.report.accepted > 0
    longer = target.generate(**inputs_of(target, inputs) | call, max_new_tokens=14)
    with pytest.warns(UserWarning, match=f"rope_type='{rope_type}' changes its frequencies after position 24"):
        assert torch.equal(target.generate(**inputs_of(target, inputs) | ours, max_new_tokens=14), longer)
    assert strategy.report.layout == "plain"


LONG = ROPES["longrope"] | {"rope_theta": 1e4, "original_max_position_embeddings": 5}


@pytest.mark.parametrize(
    ("model_type", "layout", "way"),
    all_pairs(
        ["phi3", "llama"],
        ["ragged", "padded", "packed", "lockstep"],
        [{"do_sample": False}, {"do_sample": True, "top_k": 0}],
    ),
)
def test_prompts_beyond_the_length_where_frequencies_change(model_type: str, layout: str, way: dict):
    """Then each forward has the long ones, whichever row ends first; with one shorter prompt some might not."""
    special = {"original_max_position_embeddings": 5, "sliding_window": None} if model_type == "phi3" else {}
    target = tiny(model_type, rope_parameters=dict(LONG), eos_token_id=7, max_position_embeddings=48, **special)
    inputs = prompts(4)
    inputs["attention_mask"][:, :5] = torch.tensor([[1] * 5, [0] * 2 + [1] * 3, [0] * 4 + [1], [0] * 5])
    inputs["attention_mask"][:, 5:] = 1
    call = inputs | way | {"max_new_tokens": 20}
    torch.manual_seed(0)
    expected = target.generate(**call)
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4, layout=layout, verification="coupled")
    torch.manual_seed(0)
    assert torch.equal(target.generate(**call, custom_generate=strategy), expected)
    assert strategy.report.layout == layout
    assert strategy.report.accepted > 0
    call["attention_mask"][3, :6] = 0  # five tokens
    expected = target.generate(**call | {"do_sample": False})
    with pytest.warns(UserWarning, match="'longrope' changes its frequencies after position 5"):
        text = target.generate(**call | {"do_sample": False}, custom_generate=strategy)
    assert torch.equal(text, expected)


@pytest.mark.parametrize("layout", ["ragged", "padded", "lockstep"])
def test_a_draft_whose_frequencies_change_on_the_way(layout: str):
    """Phi-3's preparation would then drop the draft's cache, and read all of its text anew; here it is kept."""
    target, reports = tiny("phi3", sliding_window=None), []
    call = prompts(3) | {"do_sample": True, "top_k": 0, "max_new_tokens": 20}
    torch.manual_seed(0)
    expected = target.generate(**call)
    for limit in (4096, 16):
        draft = near(target, 0.05)
        draft.config.original_max_position_embeddings = limit
        strategy = SpeculativeDecoding(draft, num_draft_tokens=4, layout=layout, verification="coupled")
        torch.manual_seed(0)
        assert torch.equal(target.generate(**call, custom_generate=strategy), expected)
        reports.append(strategy.report)
    assert reports[0].accepted_per_row == reports[1].accepted_per_row
    assert reports[0].accepted > 0


def test_requests_within_and_beyond_the_length_where_frequencies_change():
    """Each has the text that it has alone: a longer one would give its frequencies to all rows of a batch."""
    target = tiny(rope_parameters=LONG | {"original_max_position_embeddings": 12}, max_position_embeddings=48)
    asks = [list(range(1, 1 + length)) for length in (3, 14, 4, 20, 9, 2)]
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = list(
            strategy.generate_many(target, asks, batch_size=3, ordered=True, max_new_tokens=6, do_sample=False)
        )
    assert any("'longrope' changes its frequencies after position 12" in str(each.message) for each in caught)
    for ids, each in zip(asks, done, strict=True):
        text = target.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert each.tokens == text[0, len(ids) :].tolist()
    assert strategy.report.accepted > 0
