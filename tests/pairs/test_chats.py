"""Chats as prompts, several texts of each, and what the target's own generation config says, in `pair.complete`."""

import pytest
import torch
from tiny import near, tiny
from tiny_tokenizer import tiny_tokenizer

from hf_specx import Costs, DraftTargetPair


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}cat:"
CHAT = [{"role": "user", "content": "the cat"}]


@pytest.fixture
def pair() -> DraftTargetPair:
    tokenizer = tiny_tokenizer(bos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    target = tiny(vocab_size=280, pad_token_id=1)
    return DraftTargetPair(target, near(target, 0.1), tokenizer)


def plain(pair: DraftTargetPair, ids: list[int], seed: int, **options) -> str:
    torch.manual_seed(seed)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    return pair.tokenizer.decode(pair.target.generate(**inputs, **options)[0, len(ids) :], skip_special_tokens=True)


def test_chats_and_texts_several_times_each(pair: DraftTargetPair, tmp_path):
    options = {"do_sample": True, "max_new_tokens": 8}
    chat = pair.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    expected = [plain(pair, chat, seed, **options) for seed in (4, 5)]
    expected += [plain(pair, pair.tokenizer("a dog").input_ids, seed, **options) for seed in (6, 7)]
    asked = {"seed": 4, "num_return_sequences": 2, "verification": "coupled", "num_draft_tokens": 3, **options}
    assert pair.complete([CHAT, "a dog"], **asked) == expected
    assert len(pair.complete(iter([CHAT, "a dog"]), **asked, out=tmp_path / "it.jsonl").read_text().splitlines()) == 4
    with pytest.raises(ValueError, match="other options|num_return_sequences"):
        pair.complete([CHAT, "a dog"], **asked | {"num_return_sequences": 3}, out=tmp_path / "it.jsonl")
    with pytest.raises(ValueError, match="greedy"):
        pair.complete(["a dog"], num_return_sequences=2)
    with pytest.raises(ValueError, match="list"):
        pair.complete(CHAT)
    pair.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        pair.complete([CHAT], max_new_tokens=4)


def test_a_template_reads_options_of_its_own(pair: DraftTargetPair, tmp_path):
    """As `enable_thinking` and `tools`, for all prompts that are messages; texts stay as they are."""
    added = "{% if enable_thinking %} think{% endif %}{% for tool in tools or [] %} {{ tool.name }}{% endfor %}"
    pair.tokenizer.chat_template = TEMPLATE + added
    template_options = {"enable_thinking": True, "tools": [{"name": "a dog"}]}
    options = {"max_new_tokens": 8, "do_sample": False}
    chat = pair.tokenizer("<end>user: the cat\ncat: think a dog").input_ids
    expected = [plain(pair, ids, 0, **options) for ids in (chat, pair.tokenizer("a dog").input_ids)]
    asked = options | {"chat_template_kwargs": template_options}
    assert pair.complete([CHAT, "a dog"], **asked) == expected
    assert expected[0] != pair.complete([CHAT], **options)[0]
    out = tmp_path / "it.jsonl"
    pair.complete([CHAT], **asked, out=out)
    with pytest.raises(ValueError, match="prompt"):  # its hash is that of the whole text
        pair.complete([CHAT], **options, out=out)


@pytest.mark.parametrize(
    ("template_options", "message"),
    [
        ({1: True}, "chat_template_kwargs={1: True}"),
        ({"tokenize": True}, "tokenize"),
    ],
)
def test_options_of_a_template_are_checked(pair: DraftTargetPair, template_options, message: str):
    with pytest.raises(ValueError, match=message):
        pair.complete([CHAT], max_new_tokens=4, chat_template_kwargs=template_options)


def test_the_targets_own_generation_config_is_the_default(pair: DraftTargetPair):
    settings = pair.target.generation_config
    settings.do_sample, settings.temperature, settings.top_k, settings.max_new_tokens = True, 0.7, 9, 6
    expected = plain(pair, pair.tokenizer("a dog").input_ids, 3)
    assert pair.complete(["a dog"], seed=3, verification="coupled") == [expected]
    torch.manual_seed(3)
    inputs = pair.tokenizer(["a dog"], return_tensors="pt")
    output = pair.generate(**inputs, verification="coupled")
    width = inputs.input_ids.shape[1]
    assert pair.tokenizer.decode(output[0, width:], skip_special_tokens=True) == expected
    assert pair.report.emitted == 6


def test_a_pair_moves_as_one(pair: DraftTargetPair):
    """And forgets times of other hardware."""
    assert pair.device == torch.device("cpu")
    pair.strategy.costs = Costs({1: {"target": {1: 1.0, 9: 1.0}, "draft": 0.1}})
    assert pair.to("meta") is pair
    assert pair.target.device.type == pair.draft.device.type == "meta"
    assert not pair.strategy.costs.forward_times
