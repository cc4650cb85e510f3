"""The draft's cache holds a prefix of each row's text also where rows rest while others are nearly done."""

import pytest
import torch
from tiny import near, prompts, tiny

from hf_specx import SpeculativeDecoding
from hf_specx.drafting.schedule import Schedule
from hf_specx.engine import run
from hf_specx.models.decoder import Decoder


class OneRests(Schedule):
    """Row 1 drafts nothing before its 14th token."""

    def __call__(self, batch):
        self.batch = batch
        return super().__call__(batch)

    def number(self, row):
        return 0 if row == 1 and self.batch.counts[1] < 14 else 5


@pytest.mark.parametrize("new_tokens", range(22, 28))
def test_the_draft_reads_what_a_fresh_forward_reads(monkeypatch: pytest.MonkeyPatch, new_tokens: int):
    target, compared, step = tiny(), [], Decoder.step
    draft = near(target, 0.02)

    def noted(decoder, batch, ahead, skipped=0):
        logits = step(decoder, batch, ahead, skipped)
        if decoder.model is draft and ahead == 0 and any(batch.counts):
            for index, row in enumerate(batch.rows):
                fresh = draft(input_ids=batch.row(row)[None]).logits[0, -1]
                compared.append(torch.allclose(fresh, logits[index, -1], atol=1e-3))
        return logits

    monkeypatch.setattr(Decoder, "step", noted)
    monkeypatch.setattr(run, "make_schedule", lambda *given: OneRests(5, [new_tokens] * 2))
    for seed in range(6):
        torch.manual_seed(seed)
        strategy = SpeculativeDecoding(draft, num_draft_tokens=5)
        settings = {"do_sample": True, "top_k": 0, "max_new_tokens": new_tokens, "eos_token_id": 47, "pad_token_id": 0}
        target.generate(**prompts(2, seed=seed), **settings, custom_generate=strategy)
    assert len(compared) > 20
    assert all(compared)
