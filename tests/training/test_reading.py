"""What models say where the target wrote; of a text that is trained on again without another forward."""

import pytest
import torch
from counting import counting
from tiny import tiny
from training_cases import models, some_prompts

from hf_specx.training.reading import Remembered, Text, collate, logits_where_written


TEXTS = [Text(prompt, prompt[::-1][: 2 + number % 3]) for number, prompt in enumerate(some_prompts(10))]


@pytest.mark.parametrize("keeps", [True, False], ids=["a head that can read less", "one that cannot"])
def test_only_what_the_target_wrote_counts(keeps: bool):
    model, widths = tiny(), []
    if not keeps:
        whole = model.forward
        model.forward = lambda input_ids, attention_mask=None, use_cache=False: whole(input_ids, attention_mask)
    model.lm_head.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    batch = collate([Text([5, 6], [7, 8, 9]), Text([1, 2, 3, 4], [5])])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 8, 9], [-100, -100, -100, -100, 5]]
    with torch.no_grad():
        found = logits_where_written(model, batch)
        assert widths == [4 if keeps else 5]  # not the first prompt's first token, which has no label next
        alone = [model(torch.tensor([row])).logits[0] for row in ([5, 6, 7, 8, 9], [1, 2, 3, 4, 5])]
    torch.testing.assert_close(found, torch.cat([alone[0][1:4], alone[1][3:4]]))


def said(remembered: Remembered, numbers: list[int]) -> torch.Tensor:
    return remembered.said([TEXTS[number] for number in numbers], numbers).logits


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "gemma2", "granite"])
def test_logits_are_those_of_the_target(model_type: str):
    """Also those of Gemma 2, which are capped, and of Granite, which are scaled: they are not remembered."""
    capped = {"gemma2": {"final_logit_softcapping": 5.0}, "granite": {"logits_scaling": 3.0}}
    target = tiny(model_type, **capped.get(model_type, {}))
    remembered = Remembered(target, [], 4)
    remembered.add(TEXTS[:5])
    remembered.add(TEXTS[5:])
    with counting(target) as calls:
        said(remembered, [2, 7])
    assert bool(calls) == (model_type in capped)  # each text is read once
    for numbers in ([3, 8], [3, 4], [9, 0, 3]):
        with torch.no_grad():
            plain = logits_where_written(target, collate([TEXTS[number] for number in numbers]))
        torch.testing.assert_close(said(remembered, numbers), plain, atol=1e-4, rtol=1e-4)


def test_texts_beyond_the_room_are_read_each_time():
    target = models()[0]
    remembered = Remembered(target, [], 4, room=1)
    remembered.add(TEXTS)
    assert [number for number, kept in enumerate(remembered.known) if kept is not None] == [0, 1, 2, 3]
    for numbers in ([9, 1], [0, 1], [8, 9]):
        with torch.no_grad():
            plain = logits_where_written(target, collate([TEXTS[number] for number in numbers]))
        torch.testing.assert_close(said(remembered, numbers), plain, atol=1e-5, rtol=1e-5)
