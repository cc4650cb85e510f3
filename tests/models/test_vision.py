"""Targets that see images: the same tokens as stock, whether the draft sees the images too or takes them for text."""

import itertools
import math
from functools import cache, partial

import pytest
import torch
from all_pairs import each_value
from plain import assert_plain
from rounds import Heard
from tiny import Forwards, near, prompts, tiny
from transformers import PreTrainedModel
from vision import IMAGE, MODEL_TYPES, inputs, seeing

from hf_specx import SpeculativeDecoding
from hf_specx.common.round import Round
from hf_specx.models import choose as layouts


NEW_TOKENS, NUM_DRAFT_TOKENS = 20, 4
FEWEST = math.ceil((NEW_TOKENS - 1) / (NUM_DRAFT_TOKENS + 1))  # rounds, if all candidates are accepted
SETTINGS = {
    "greedy": {"do_sample": False},
    "two texts a row": {"do_sample": True, "top_k": 0, "num_return_sequences": 2},
}
LENGTH = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
CALLS = [((1,), "two texts a row"), ((1, 0, 1), "greedy"), ((1, 1, 1), "two texts a row")]  # images in each row
LAYOUTS = ("ragged", "padded", "lockstep")
EXACT = [(t, layout) for t in MODEL_TYPES for layout in LAYOUTS if (t, layout) != ("paligemma", "ragged")]
BY_DEFAULT = EXACT[1::2] + [(model_type, "auto") for model_type in MODEL_TYPES]  # each type in two or three layouts
SLOWLY = [pytest.param(*case, marks=pytest.mark.slow) for case in EXACT[::2]]


def generated(target: PreTrainedModel, call: dict, **settings) -> torch.Tensor:
    torch.manual_seed(4)
    return target.generate(**call, **LENGTH, **settings)


@cache
def plain(model_type: str, images: tuple[int, ...], settings: str) -> torch.Tensor:
    target = seeing(model_type)
    return generated(target, inputs(target, images), **SETTINGS[settings])


def strategy(draft: PreTrainedModel, layout: str) -> SpeculativeDecoding:
    return SpeculativeDecoding(draft, num_draft_tokens=NUM_DRAFT_TOKENS, verification="coupled", layout=layout)


@pytest.fixture
def any_layout(monkeypatch: pytest.MonkeyPatch):
    for name in ("llama", *MODEL_TYPES):
        monkeypatch.setitem(layouts.LAYOUTS_OF, name, LAYOUTS)


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize(("model_type", "layout"), [*BY_DEFAULT, *SLOWLY])
def test_equals_stock(model_type: str, layout: str, request: pytest.FixtureRequest):
    """For a draft that sees the images and for one that reads their placeholders as words."""
    if layout != "auto":
        request.getfixturevalue("any_layout")
    target, rounds = seeing(model_type), []
    for (images, name), draft in itertools.product(CALLS, (near(target, 0.02), tiny())):
        call = inputs(target, images) | SETTINGS[name]
        with Forwards(target) as forwards:
            output = generated(target, call, custom_generate=strategy(draft, layout))
        assert torch.equal(output, plain(model_type, images, name)), (images, name, type(draft))
        assert max(forwards.lengths[1:]) == NUM_DRAFT_TOKENS + 1
        rounds.append(len(forwards.lengths) - 1)
    seeing_draft, blind_draft = sum(rounds[::2]), sum(rounds[1::2])
    assert FEWEST * len(rounds[::2]) < seeing_draft < blind_draft <= (NEW_TOKENS - 1) * len(rounds[1::2])


@pytest.mark.parametrize(("model_type", "layout"), [case for case in EXACT if case[1] != "lockstep"])
@pytest.mark.usefixtures("any_layout")
def test_equal_draft_sees_what_the_target_sees(model_type: str, layout: str):
    """All is accepted, so the draft has the same images at the same positions; a wrong one would only be slower."""
    target = seeing(model_type)
    twin = near(target, 0.0)
    for images, name in ((1,), "greedy"), ((1, 0, 1), "two texts a row"):
        compared = assert_plain(target, strategy(twin, layout), inputs(target, images), **SETTINGS[name], **LENGTH)
        assert compared.forwards - 1 == FEWEST


@pytest.mark.parametrize("model_type", ["llava", "gemma3", "qwen2_5_vl"])
@pytest.mark.usefixtures("any_layout")
def test_draft_that_cannot_read_the_features(model_type: str):
    """A smaller model of the same type embeds in another width, so images are words to it."""
    target = seeing(model_type)
    draft = seeing(model_type, hidden_size=16, num_attention_heads=2)
    call = inputs(target, (1, 0, 1))
    with Forwards(draft) as forwards:
        assert_plain(target, strategy(draft, "ragged"), call, do_sample=True, **LENGTH)
    assert sum(forwards.lengths) > NEW_TOKENS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("any_layout")
def test_state_that_stock_leaves_on_the_model(layout: str):
    """Qwen notes on itself how far positions lag behind columns; a draft that is the target itself shares the note."""
    target = near(seeing("qwen2_5_vl"), 0.0)
    call = inputs(target, (1, 1, 1))
    expected = generated(target, call)
    rope_deltas = target.model.rope_deltas.clone()
    assert len(set(rope_deltas.flatten().tolist())) == 3
    for draft in (target, near(target, 0.05)):
        generated(target, inputs(target, (1,)))
        assert torch.equal(generated(target, call, custom_generate=strategy(draft, layout)), expected)
        assert torch.equal(target.model.rope_deltas, rope_deltas)
        assert torch.equal(generated(target, call), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("any_layout")
def test_embeddings_as_the_prompt(layout: str):
    """Without ids a draft of the same width reads the embeddings too; with ids, any draft reads those."""
    target, words = tiny(), prompts(3)
    mask = {"attention_mask": words["attention_mask"]}
    embeds = {"inputs_embeds": target.get_input_embeddings()(words["input_ids"]).detach() * 1.2}
    twin, narrow = near(target, 0.0), tiny(hidden_size=16, head_dim=4)
    cases = [(embeds | mask, twin), (embeds, twin), (embeds | words, narrow), (embeds | words, near(target, 0.05))]
    for chosen in SETTINGS.values():
        for call, draft in cases:
            outcome = assert_plain(target, strategy(draft, layout), call, **chosen, **LENGTH)
            assert outcome.text.shape[1] == NEW_TOKENS + ("input_ids" in call) * 11
            assert draft is not twin or outcome.forwards - 1 == FEWEST
    with pytest.raises(ValueError, match="input_ids="):
        generated(target, embeds, custom_generate=strategy(narrow, layout))


def compared(draft: PreTrainedModel, done: Round) -> int:
    """How many greedy candidates there are, which have to be those of the draft alone for the text without images."""
    for index, (row, length) in enumerate(zip(done.rows, done.draft.lengths, strict=True)):
        text = done.batch.row(row)[: done.batch.row_states[row].prompt_length + done.emitted_before[index]]
        words = text[text != IMAGE]
        for token in done.draft.tokens[index, :length]:
            scores = draft(words[None]).logits[0, -1].index_fill(0, torch.tensor([IMAGE]), -torch.inf)
            assert scores.argmax() == token
            words = torch.cat([words, token[None]])
    return sum(done.draft.lengths)


@pytest.mark.parametrize(("model_type", "layout"), each_value(["llava", "qwen2_5_vl"], LAYOUTS))
@pytest.mark.usefixtures("any_layout")
def test_a_draft_of_text_reads_the_words_alone(model_type: str, layout: str):
    """What stands for an image is hidden from it, and its positions count the words."""
    target, draft = seeing(model_type), tiny()
    chosen = strategy(draft, layout)
    chosen.listeners = (watch := Heard(partial(compared, draft)),)
    generated(target, inputs(target, (1, 0, 1)), do_sample=False, custom_generate=chosen, suppress_tokens=[IMAGE])
    assert sum(watch) > NEW_TOKENS
