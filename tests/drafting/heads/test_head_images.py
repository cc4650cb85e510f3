"""Heads of targets that see images: they read the states behind the pictures, at the target's positions."""

from pathlib import Path

import head_reference
import pytest
import torch
from alignment import Aligned, loaded
from head_files import random_head
from head_reference import target_states
from plain import assert_plain
from vision import IMAGE, inputs, seeing

from hf_specx import SpeculativeDecoding


SIDES = {0: 2, 2: 3}  # of the pictures in rows, in tokens; each is two tokens high
CALL = {"max_new_tokens": 16, "pad_token_id": 0, "suppress_tokens": [IMAGE]}


class Seen(Aligned):
    """The comparison, with the row's picture for the target and Qwen's positions for the head."""

    def states(self, texts: dict[int, list[int]]) -> list[list[torch.Tensor]]:
        return [self._states_of_row(row, text) for row, text in texts.items()]

    def _states_of_row(self, row: int, text: list[int]) -> list[torch.Tensor]:
        ids = torch.tensor([text[:-1]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).long()}
        if row in SIDES:
            inputs["pixel_values"] = self.batch_inputs["pixel_values"].split([16, 24])[row // 2]
            inputs["image_grid_thw"] = torch.tensor([[1, 4, 2 * SIDES[row]]])
        return [state[0] for state in target_states(self.target, self.head.layer_ids or [None], **inputs)]

    def logits(self, *args) -> list[torch.Tensor]:
        return [logits.index_fill(0, torch.tensor([IMAGE]), -torch.inf) for logits in super().logits(*args)]

    def positions(self) -> torch.Tensor:
        """A picture behind two words takes one position in time, and the next word comes behind its longer side."""
        side = SIDES.get(self.row, 0)
        return torch.cat([torch.arange(2), torch.full((2 * side,), 2), torch.arange(2 + side, 64)])


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dspark", "medusa"])
def test_heads_see_pictures_by_states_and_positions(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target, head = seeing("qwen2_5_vl", num_hidden_layers=8), random_head(kind)
    draft = loaded(head, tmp_path / "head", target)
    watch, rotate = Seen(head, target), head_reference._rotate
    monkeypatch.setattr(head_reference, "_rotate", lambda x, at, head: rotate(x, watch.positions()[at], head))
    watch.batch_inputs = batch_inputs = inputs(target, (1, 0, 1))
    for settings in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification="coupled")
        strategy.listeners = () if settings["do_sample"] else (watch,)
        assert_plain(target, strategy, batch_inputs, **CALL, **settings)
    watch.check(50)
