"""What several files of this room use."""

import pytest
import torch

from hf_specx.models.decoder import Decoder


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the logits of each step of a draft are those of a forward of the whole text, without a cache."""
    found, step = [], Decoder.step

    def noted(decoder, batch, ahead, skipped=0):
        logits = step(decoder, batch, ahead, skipped)
        if ahead == 0 and any(batch.counts):
            for index, row in enumerate(batch.rows):
                fresh = decoder.model(input_ids=batch.row(row)[None]).logits[0, -1]
                found.append(torch.allclose(fresh, logits[index, -1], atol=1e-3))
        return logits

    monkeypatch.setattr(Decoder, "step", noted)
    return found
