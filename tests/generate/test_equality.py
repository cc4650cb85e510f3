"""The master test: the same tokens as stock `generate`, greedily and under the same seed, for any draft.

Any error in a mask, a position, a cache, a processor or a stop shows here as a different token.
"""

from functools import cache

import pytest
import torch
from all_pairs import all_pairs
from plain import assert_plain, coupled
from sweep import outcomes
from tiny import VOCAB_SIZE, near, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.models.attention import Masks
from hf_specx.models.ragged import RaggedRunner
from hf_specx.sampling import noise
from hf_specx.sampling.stopping import Stopping
from hf_specx.sampling.verifiers import CoupledVerifier


MODEL_TYPES = ("llama", "qwen3", "mistral", "gpt2", "gpt_neox")
SETTINGS = {
    "greedy": {"do_sample": False},
    "plain": {"do_sample": True, "top_k": 0},
    "warped": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "penalised": {"do_sample": True, "temperature": 1.3, "top_k": 0, "repetition_penalty": 1.3},
}
PADS = ("equal to the end token", "emitted by the model")
NEW_TOKENS = 31


@cache
def models(model_type: str) -> tuple[PreTrainedModel, dict[str, PreTrainedModel]]:
    target = tiny(model_type)
    return target, {"equal": target, "near": near(target, 0.05), "unrelated": tiny(model_type, seed=9)}


@pytest.mark.parametrize(("model_type", "rows", "settings"), all_pairs(MODEL_TYPES, [1, 4, 8], SETTINGS))
def test_equals_stock(model_type: str, rows: int, settings: str):
    (target, drafts), call, compared = models(model_type), SETTINGS[settings] | {"max_new_tokens": NEW_TOKENS}, None
    for name, draft in drafts.items():
        for number in (1, 4, 7):
            strategy = SpeculativeDecoding(draft, num_draft_tokens=number, verification="coupled")
            compared = assert_plain(target, strategy, prompts(rows), before=compared, **call)
            assert min(len(set(row.tolist())) for row in compared.text[:, 11:]) >= 5, name


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_near_drafts_see_every_outcome(model_type: str):
    """Rejections, full acceptances and unequal rounds all occur, else the grid above would show little."""
    target, drafts = models(model_type)
    seen: set[str] = set()
    for settings in SETTINGS.values():
        strategy = SpeculativeDecoding(drafts["near"], num_draft_tokens=4, verification="coupled")
        target.generate(**prompts(4), **settings, max_new_tokens=NEW_TOKENS, custom_generate=strategy)
        seen |= outcomes(strategy.report)
    assert seen == {"rejection", "full acceptance", "unequal counts"}


@pytest.mark.parametrize(("model_type", "settings", "pad"), all_pairs(MODEL_TYPES, SETTINGS, PADS))
def test_end_and_pad_tokens(model_type: str, settings: str, pad: str):
    """Rows end at different steps; ends are never read off ids that may be pads."""
    target, drafts = models(model_type)
    chosen = SETTINGS[settings] | {"max_new_tokens": 60}
    torch.manual_seed(4)
    free = target.generate(**prompts(8), **chosen)
    common = torch.bincount(free[:, 11:].flatten(), minlength=VOCAB_SIZE).argsort(descending=True).tolist()
    eos = [common[3], common[8]]
    chosen |= {"eos_token_id": eos, "pad_token_id": eos[0] if pad == "equal to the end token" else common[0]}
    compared = None
    for draft in drafts.values():
        strategy = SpeculativeDecoding(draft, num_draft_tokens=4, verification="coupled")
        compared = assert_plain(target, strategy, prompts(8), before=compared, **chosen)
        ends = torch.isin(compared.text[:, 11:], torch.tensor(eos)).int().argmax(-1)
        assert len(set(ends.tolist())) > 2


REDRAWN = {  # where noise comes back from a saved state of the generator
    "at once": {(noise, "MAX_NOISE_BYTES"): 0},
    "after a round": {(noise, "MAX_NOISE_BYTES"): 5 * 4 * VOCAB_SIZE * 4},
    "from one of few states": {(noise, "MAX_NOISE_BYTES"): 0, (noise, "LATEST_STATES"): 2, (noise, "STATE_EVERY"): 4},
}


@pytest.mark.parametrize("why", REDRAWN)
def test_eager_attention_and_noise_that_is_drawn_again(why: str, monkeypatch: pytest.MonkeyPatch):
    """Eager attention takes the same masks."""
    for place, number in REDRAWN[why].items():
        monkeypatch.setattr(*place, number)
    target = tiny("mistral", attn_implementation="eager")
    assert_plain(target, coupled(target, 0.05), **SETTINGS["plain"], max_new_tokens=NEW_TOKENS)


def mask_off_by_one(self: Masks, slots: torch.Tensor, *others):
    return MASK(self, slots - 1, *others)


def positions_off_by_one(self: RaggedRunner, batch: Batch, emitted: torch.Tensor, *others):
    return POSITIONS(self, batch, emitted + 1, *others)


def cut_one_late(self: Stopping, batch: Batch, tokens: list[list[int]], gained: list[int], stops: list[list[bool]]):
    lengths = CUT(self, batch, tokens, gained, stops)
    for row in batch.row_states:
        row.stopped_at = None if row.stopped_at is None else row.stopped_at + 1
    return [min(number + 1, most) for number, most in zip(lengths, gained, strict=True)]


def noise_of_another_row(self: CoupledVerifier, batch: Batch, probs: torch.Tensor, ahead: int):
    return NOISE(self, batch, probs, ahead).roll(1, 0)


MASK, POSITIONS, CUT, NOISE = Masks.__call__, RaggedRunner._positions, Stopping.cut_at_stops, CoupledVerifier.noise
FAULTS = {
    "mask": (Masks, "__call__", mask_off_by_one),
    "position": (RaggedRunner, "_positions", positions_off_by_one),
    "stop": (Stopping, "cut_at_stops", cut_one_late),
    "noise": (CoupledVerifier, "noise", noise_of_another_row),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch):
    """The tests above can fail: each of these errors gives other tokens."""
    target, drafts = models("llama")
    settings = SETTINGS["plain"] | {"max_new_tokens": NEW_TOKENS, "eos_token_id": list(range(1, 9))}
    monkeypatch.setattr(*FAULTS[fault])
    strategy = SpeculativeDecoding(drafts["near"], num_draft_tokens=4, verification="coupled")
    with pytest.raises(AssertionError, match="another text"):
        assert_plain(target, strategy, **settings)
