"""Logits where the target wrote; for a text that is trained on again without another forward."""

import pytest
import torch
from counting import counting
from tiny import tiny
from training_cases import models, some_prompts

from hf_specx.training.target_outputs import TargetOutputCache, Text, collate, labelled_logits


TEXTS = [Text(prompt, prompt[::-1][: 2 + number % 3]) for number, prompt in enumerate(some_prompts(10))]


@pytest.mark.parametrize("reads_less", [True, False], ids=["a head that can read less", "one that cannot"])
def test_only_what_the_target_wrote_counts(reads_less: bool):
    model, widths = tiny(), []
    if not reads_less:
        forward = model.forward
        model.forward = lambda input_ids, attention_mask=None, use_cache=False: forward(input_ids, attention_mask)
    model.lm_head.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
    batch = collate([Text([5, 6], [7, 8, 9]), Text([1, 2, 3, 4], [5])])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 8, 9], [-100, -100, -100, -100, 5]]
    with torch.no_grad():
        logits = labelled_logits(model, batch)
        assert widths == [4 if reads_less else 5]  # not the first prompt's first token, which has no label next
        alone = [model(torch.tensor([row])).logits[0] for row in ([5, 6, 7, 8, 9], [1, 2, 3, 4, 5])]
    torch.testing.assert_close(logits, torch.cat([alone[0][1:4], alone[1][3:4]]))


def cached_logits(cache: TargetOutputCache, numbers: list[int]) -> torch.Tensor:
    return cache.outputs([TEXTS[number] for number in numbers], numbers).logits


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "gemma2", "granite"])
def test_logits_are_those_of_the_target(model_type: str):
    """Also those of Gemma 2, which are capped, and of Granite, which are scaled: they are not cached."""
    capped = {"gemma2": {"final_logit_softcapping": 5.0}, "granite": {"logits_scaling": 3.0}}
    target = tiny(model_type, **capped.get(model_type, {}))
    cache = TargetOutputCache(target, [], 4)
    cache.add(TEXTS[:5])
    cache.add(TEXTS[5:])
    with counting(target) as calls:
        cached_logits(cache, [2, 7])
    assert bool(calls) == (model_type in capped)  # each text is read once
    for numbers in ([3, 8], [3, 4], [9, 0, 3]):
        with torch.no_grad():
            plain = labelled_logits(target, collate([TEXTS[number] for number in numbers]))
        torch.testing.assert_close(cached_logits(cache, numbers), plain, atol=1e-4, rtol=1e-4)


def test_texts_beyond_the_room_are_read_each_time():
    target = models()[0]
    cache = TargetOutputCache(target, [], 4, max_bytes=1)
    cache.add(TEXTS)
    assert [number for number, tensors in enumerate(cache.stored) if tensors is not None] == [0, 1, 2, 3]
    for numbers in ([9, 1], [0, 1], [8, 9]):
        with torch.no_grad():
            plain = labelled_logits(target, collate([TEXTS[number] for number in numbers]))
        torch.testing.assert_close(cached_logits(cache, numbers), plain, atol=1e-5, rtol=1e-5)
