"""Texts as batches, and what models say where the target wrote."""

import pytest
import torch
from tiny import tiny

from hf_specx.training.reading import Text, collate, logits_where_written


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
