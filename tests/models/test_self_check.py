"""What no table knows is measured before its candidates count: wrong targets have plain's text, right ones a draft."""

import warnings
from collections.abc import Callable

import pytest
import torch
import zoo
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from all_pairs import each_value
from counting import counting, reads_only
from plain import assert_plain, coupled
from tiny import near, prompts, tiny
from unheard import RIGHT, WRONG, unheard_of

from hf_specx import Request, SpeculativeDecoding
from hf_specx.models.foreign_code import untested_traits
from hf_specx.models.self_check import STEPS


NEW = {"max_new_tokens": 20}
GREEDY, SAMPLED = NEW | {"do_sample": False}, NEW | {"do_sample": True, "top_k": 0}
pytestmark = pytest.mark.filterwarnings("ignore:.*transformers' own sampler", "ignore:in this batch all rows advance")


@pytest.mark.parametrize(("name", "rows"), each_value(WRONG, [3, 1]))
def test_a_wrong_target_has_the_text_of_plain_generate(name: str, rows: int):
    target = WRONG[name]()
    strategy = SpeculativeDecoding(tiny(seed=1), num_draft_tokens=4, verification="coupled")
    for settings in (GREEDY, SAMPLED):
        assert_plain(target, strategy, prompts(rows), **settings)
        if rows == 1 and name == "scores_depend_on_rows":  # their number never changes
            assert strategy.report.layout == "ragged"
        else:
            assert strategy.report.layout == "plain"
            assert "total variation" in strategy.report.layout_reason


@pytest.mark.parametrize("name", WRONG)
def test_it_would_have_another_text_if_it_were_trusted(name: str, monkeypatch: pytest.MonkeyPatch):
    """So the faults are such that a text shows them."""
    monkeypatch.setattr("hf_specx.engine.measured_target.untested_traits", lambda model: frozenset())
    target, strategy = WRONG[name](), coupled(tiny(), 0.1)
    settings = SAMPLED | {"max_new_tokens": 60, "eos_token_id": 3}  # so that rows leave the batch

    def differ(seed: int) -> bool:
        texts = []
        for custom_generate in (None, strategy):
            torch.manual_seed(seed)
            texts.append(target.generate(**prompts(4), **settings, custom_generate=custom_generate).tolist())
        return texts[0] != texts[1]

    assert any(map(differ, range(8)))


@pytest.mark.parametrize(("model_type", "dtype"), each_value(RIGHT, [torch.float32, torch.float64, torch.bfloat16]))
def test_a_right_target_is_speculated_in_the_layout_that_it_can_have(model_type: str, dtype: torch.dtype):
    layout, settings = RIGHT[model_type]
    target = unheard_of(tiny(model_type, **settings)).to(dtype)
    strategy = coupled(target, 0.02)
    for rows in (1, 3):
        inputs = prompts(rows)
        if dtype == torch.float64:  # where plain `generate` gives some models no scores behind pads
            inputs["attention_mask"].fill_(1)
        if dtype == torch.bfloat16:  # where texts part by rounding, in other batch shapes too
            target.generate(**inputs, **GREEDY, custom_generate=strategy)
        else:
            assert_plain(target, strategy, inputs, **SAMPLED)
        assert (strategy.report.layout, strategy.report.accepted > 0) == (layout, True)
        assert "in no table" in strategy.report.layout_reason


def test_hooks_of_accelerate_are_trusted():
    """On a type that no table knows they are no reason of their own."""
    target = unheard_of(tiny())
    for module in target.modules():
        if not list(module.children()):
            add_hook_to_module(module, AlignDevicesHook())
    (trait,) = untested_traits(target)
    assert "in no table" in trait.words
    strategy = coupled(tiny(), 0.05)
    assert_plain(target, strategy, prompts(3), **SAMPLED)
    assert (strategy.report.layout, strategy.report.accepted > 0) == ("ragged", True)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_an_adapter_of_peft_on_an_unknown_type():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    target = peft.get_peft_model(unheard_of(tiny()), config)
    (trait,) = untested_traits(target.base_model.model)
    assert "in no table" in trait.words
    strategy = coupled(tiny(), 0.05)
    assert_plain(target, strategy, prompts(3), **SAMPLED)
    assert (strategy.report.layout, strategy.report.accepted > 0) == ("ragged", True)


@pytest.mark.parametrize("limit", [1, 2, 3, 6])
def test_texts_of_few_tokens_are_measured_as_far_as_they_go(limit: int):
    """Positions behind their ends may not exist: here the table of positions has none."""
    settings = {"do_sample": False, "max_new_tokens": limit, "num_return_sequences": 1}
    right = unheard_of(tiny("gpt2", n_positions=10 + limit))
    strategy = coupled(tiny("gpt2"), 0.1)
    for target, layout in ((right, "ragged"), (WRONG["steered"](), "plain")):
        assert_plain(target, strategy, prompts(3), **settings)
        assert limit == 1 or strategy.report.layout == layout


def test_it_is_measured_once_and_later_calls_are_as_those_of_a_trusted_one():
    trusted, target = tiny(), unheard_of(tiny())
    strategy = coupled(trusted, 0.1)
    with counting(trusted) as wanted:
        trusted.generate(**prompts(3), **GREEDY, custom_generate=strategy)
    numbers = []
    for _ in range(2):
        with counting(target) as forwards:
            target.generate(**prompts(3), **GREEDY, custom_generate=strategy)
        numbers.append(len(forwards))
    assert numbers == [len(wanted) + STEPS + 1, len(wanted)]


def test_a_new_hook_is_measured_and_one_that_reads_only_is_not():
    target, strategy = tiny(), coupled(tiny(), 0.1)
    target.register_forward_hook(reads_only(lambda *_: None))
    assert not untested_traits(target)
    passive = target.lm_head.register_forward_hook(lambda *_: None)
    assert_plain(target, strategy, **GREEDY)
    assert "hook" in strategy.report.layout_reason
    passive.remove()
    target.lm_head.register_forward_hook(lambda module, args, output: output + output.mean(1, keepdim=True))
    assert_plain(target, strategy, **GREEDY)
    assert strategy.report.layout == "plain"


def odd_after_even(row: int, ids: torch.Tensor) -> list[int]:
    """The tokens that may follow."""
    return list(range(1 + int(ids[-1]) % 2, 32, 2))


@pytest.mark.parametrize("function", [None, odd_after_even])
@pytest.mark.parametrize("max_batch_tokens", [None, 30])  # with 30, one more request waits beside those of the batch
@pytest.mark.parametrize("seed", [None, 5])
def test_requests_for_a_wrong_target_are_decoded_one_by_one(
    seed: int | None, max_batch_tokens: int | None, function: Callable[[int, torch.Tensor], list[int]] | None
):
    target = WRONG["forward_replaced"]()
    asked = [Request(list(range(1, 4 + n)), max_new_tokens=6 + n, seed=seed) for n in range(5)]
    options = {"do_sample": False, "prefix_allowed_tokens_fn": function}
    strategy = SpeculativeDecoding(tiny(seed=1), num_draft_tokens=3)
    rows = {"batch_size": 3, "max_batch_tokens": max_batch_tokens}
    results = list(strategy.generate_many(target, iter(asked), ordered=True, **rows, **options))
    assert [done.index for done in results] == list(range(5))
    for request, done in zip(asked, results, strict=True):
        ids = torch.tensor([request.input_ids])
        expected = target.generate(ids, max_new_tokens=request.max_new_tokens, **options)
        assert done.tokens == expected[0, ids.shape[1] :].tolist()


def test_a_warning_says_why_and_how_to_silence_it():
    target, strategy = WRONG["steered"](), coupled(tiny(), 0.1)
    with pytest.warns(UserWarning, match="LlamaDecoderLayer"):
        target.generate(**prompts(2), **GREEDY, custom_generate=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(**prompts(2), **GREEDY, custom_generate=strategy)


def test_registered_models_are_trusted():
    for model_type in RIGHT:
        assert not untested_traits(tiny(model_type))


@pytest.mark.parametrize("capacity", [1, 3, 64])
def test_experts_with_a_capacity_are_fed_no_more_than_fits(capacity: int):
    """Switch Transformers leaves out tokens of a row that an expert has no room for, which single steps never do."""
    target = zoo.build("seq2seq", "switch_transformers")
    target.config.expert_capacity = capacity
    for module in target.modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = capacity
    strategy = SpeculativeDecoding(near(target, 0.02), num_draft_tokens=6, verification="coupled")
    inputs = zoo.inputs(target)
    for settings in (GREEDY, SAMPLED):
        assert_plain(target, strategy, inputs, **settings)
        report = strategy.report
        assert (report.layout == "plain") == (capacity == 1)
        fed = [record.drafted for history in report.history for record in history]
        assert max(fed, default=0) == {1: 0, 3: 2, 64: 6}[capacity]
