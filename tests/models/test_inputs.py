"""What else a call may start from: repeated rows, an earlier cache, and pairs of two families."""

import copy
import math

import pytest
import torch
from all_pairs import each_value
from plain import assert_plain
from tiny import VOCAB_SIZE, Forwards, near, prompts, tiny
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.common.wrappers import text_decoder
from hf_specx.models.slots import CACHE


GREEDY = {"do_sample": False, "max_new_tokens": 20}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}


def strategy(draft: PreTrainedModel, **options) -> SpeculativeDecoding:
    return SpeculativeDecoding(draft, num_draft_tokens=4, verification="coupled", **options)


def same(target: PreTrainedModel, draft: PreTrainedModel, inputs: dict, settings: dict, **options) -> int:
    """Assert that the tokens are stock's, given a fresh copy of any cache; returns the number of target forwards."""
    return assert_plain(target, strategy(draft, **options), {}, lambda: copy.deepcopy(inputs), **settings).forwards


@pytest.mark.parametrize(
    ("model_type", "layout", "size"), [("llama", "ragged", 4), ("mistral", "padded", 1), ("mistral", "lockstep", 30)]
)
def test_prompts_that_are_read_in_chunks(model_type: str, layout: str, size: int):
    target = tiny(model_type)
    with Forwards(draft := near(target, 0.05)) as of_draft:
        count = same(target, draft, prompts(3), SAMPLED | {"prefill_chunk_size": size}, layout=layout)
    assert count - math.ceil(11 / size) < 19
    assert max(of_draft.lengths) <= max(size, 2)


def test_prompts_of_a_queue_are_read_in_chunks():
    """Those that come later, and what several begin with."""
    target, begin = tiny(), list(range(1, 31))
    asked = [[*begin, 3 * number, 7] for number in range(1, 4)] + [[*range(40, 5, -1)]]
    plain = [target.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist() for ids in asked]
    with Forwards(target) as of_target, Forwards(draft := near(target, 0.05)) as of_draft:
        done = strategy(draft).generate_many(
            target, asked, batch_size=2, ordered=True, prefill_chunk_size=6, **GREEDY | {"pad_token_id": 0}
        )
        assert [one.tokens for one in done] == plain
    assert max(of_target.lengths + of_draft.lengths) == 6


def test_labels_are_left_out_as_in_stock():
    """A collator puts them into a batch."""
    target, inputs = tiny(), prompts(3)
    inputs["labels"] = inputs["input_ids"]
    assert same(target, near(target, 0.05), inputs, GREEDY) < 20


def later(text: torch.Tensor, mask: torch.Tensor, words: int = 5) -> dict[str, torch.Tensor]:
    more = torch.randint(1, VOCAB_SIZE, (len(text), words), generator=torch.Generator().manual_seed(3))
    ids = torch.cat([text, more], -1)
    return {"input_ids": ids, "attention_mask": torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - 11)], -1)}


@pytest.mark.parametrize(("model_type", "settings"), each_value(["llama", "mistral"], [GREEDY, SAMPLED]))
def test_a_cache_of_stock_is_continued_and_filled(model_type: str, settings: dict):
    """The user's own object is what holds the text afterwards, as with stock; a full window takes the lockstep."""
    target, inputs = tiny(model_type), prompts(3)
    draft, cache = near(target, 0.05), DynamicCache(config=target.config)
    text = target.generate(**inputs, **GREEDY, **{CACHE: cache})
    turn, speculative = later(text, inputs["attention_mask"]) | GREEDY, strategy(draft)
    output = target.generate(**turn, **{CACHE: cache}, custom_generate=speculative)
    assert torch.equal(output, target.generate(**turn))
    assert speculative.report.layout == ("ragged" if model_type == "llama" else "lockstep")
    assert cache.get_seq_length() == 36 + 20 - 1
    turn = later(output, inputs["attention_mask"])
    assert same(target, draft, turn | {CACHE: cache}, settings) < 20


def test_only_the_new_tokens_are_passed():
    """input_ids are the new words alone, and the mask covers everything, as stock allows."""
    target, inputs = tiny(), prompts(3)
    text = target.generate(**inputs, **GREEDY, **{CACHE: (cache := DynamicCache())})
    turn = later(text, inputs["attention_mask"])
    new = turn | {"input_ids": turn["input_ids"][:, -6:], CACHE: cache}
    assert same(target, near(target, 0.05), new, SAMPLED) < 20


def test_an_exception_leaves_a_cache_of_the_user_alone():
    target, cache = tiny(), DynamicCache()
    text = target.generate(**prompts(2), **GREEDY, **{CACHE: cache})
    turn = later(text, prompts(2)["attention_mask"])
    keys = cache.layers[0].keys.clone()
    handle = target.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.generate(**turn, **GREEDY, **{CACHE: cache}, custom_generate=strategy(near(target, 0.05)))
    handle.remove()
    assert torch.equal(cache.layers[0].keys, keys)


RECURRENT = {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}
DRAFTS = {
    "learned positions": lambda: tiny("gpt2", seed=3),
    "other rotary positions": lambda: tiny("gpt_neox", seed=3),
    "a sliding window": lambda: tiny("mistral", seed=3),
    "linear biases": lambda: tiny("bloom", seed=3, n_layer=2, n_head=4),
    "a recurrent state": lambda: tiny("mamba2", seed=3, **RECURRENT),
    "a state that forgets": lambda: tiny("mamba", seed=3, state_size=8),
    "half precision": lambda: tiny("llama", seed=3).bfloat16(),
    "double precision": lambda: tiny("llama", seed=3).double(),
}


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize(("name", "settings"), each_value(DRAFTS, [GREEDY, SAMPLED]))
def test_pairs_of_two_families(name: str, settings: dict):
    """Any draft is exact; far ones are hardly accepted, so that nearly every round rolls back."""
    same(tiny("llama"), DRAFTS[name](), prompts(3), settings)
    if settings["do_sample"] and name != "half precision":
        same(DRAFTS["learned positions"](), DRAFTS[name](), prompts(3), settings)


@pytest.mark.parametrize("layout", ["ragged", "padded", "lockstep"])
def test_token_types_reach_every_forward(layout: str):
    target, inputs = tiny("gpt2"), prompts(3)
    types = torch.randint(1, VOCAB_SIZE, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(4))
    without = target.generate(**inputs, **GREEDY)
    inputs["token_type_ids"] = types
    assert not torch.equal(target.generate(**inputs, **GREEDY), without)
    for settings in (GREEDY, SAMPLED):
        assert same(target, near(target, 0.05), inputs, settings, layout=layout) < 20


@pytest.mark.usefixtures("draft_pays")
@pytest.mark.parametrize(
    ("layout", "new_tokens", "num_draft_tokens"),
    each_value(["ragged", "padded", "packed", "lockstep"], [1, 2, 20], ["auto", 4]),
)
def test_a_text_that_fills_its_table_of_positions(layout: str, new_tokens: int, num_draft_tokens: int | str):
    """The last token is never fed, so that it needs no position; candidates behind it must not either."""
    target = tiny("gpt2", max_position_embeddings=11 + new_tokens - 1)
    speculative = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=num_draft_tokens, layout=layout)
    assert_plain(target, speculative, do_sample=False, max_new_tokens=new_tokens)


@pytest.mark.usefixtures("draft_pays")
@pytest.mark.parametrize("positions", [8, 16])
def test_a_draft_with_fewer_positions_than_the_prompt_or_the_text(positions: int):
    draft = tiny("gpt2", seed=3, max_position_embeddings=positions)
    for number in (4, "auto"):
        assert_plain(tiny("gpt2"), SpeculativeDecoding(draft, num_draft_tokens=number), **GREEDY)


def test_a_draft_that_draws_random_numbers_is_coupled_all_the_same():
    def draw(*_: object) -> None:
        torch.rand(3)

    target = tiny()
    draft = near(target, 0.05)
    draft.register_forward_pre_hook(draw)
    assert same(target, draft, prompts(3), SAMPLED) < 20


def test_a_cache_that_cannot_be_filled_is_said():
    """A window cannot be put together from rows that ended at different steps; the user's cache stays empty."""
    target = tiny("mistral")
    free = target.generate(**prompts(3), **GREEDY)
    settings = GREEDY | {"eos_token_id": int(free[0, 14]), "pad_token_id": 0}
    cache = DynamicCache(config=target.config)
    call = prompts(3) | settings | {CACHE: cache}
    with pytest.warns(UserWarning, match=CACHE):
        target.generate(**call, custom_generate=strategy(tiny("mistral"), layout="lockstep"))
    assert cache.get_seq_length() == 0


def test_a_body_without_a_model_inside_is_its_own_decoder():
    """As code of others may have it; Llama 4's has one."""

    class Whole(PreTrainedModel):
        config_class, base_model_prefix = LlamaConfig, ""

    whole = Whole(LlamaConfig())
    whole.lm_head = torch.nn.Linear(8, 8)
    assert text_decoder(whole) is whole
