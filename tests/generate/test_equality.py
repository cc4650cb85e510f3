"""The master test: the same tokens as stock `generate`, greedily and under the same seed, for any draft.

Any error in a mask, a position, a cache, a processor or a stop shows here as a different token.
"""

import math
from functools import cache

import pytest
import torch
from all_pairs import all_pairs
from tiny import VOCAB_SIZE, Forwards, near, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.engine import run
from hf_specx.models.ragged import Masks, RaggedDecoder
from hf_specx.sampling.noise import StockNoise
from hf_specx.sampling.stopping import Stopping


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


def stock(target: PreTrainedModel, inputs: dict, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Stock's output, and the state it leaves the generator in."""
    torch.manual_seed(4)
    output = target.generate(**inputs, **settings)
    return output, torch.get_rng_state()


def ours(target: PreTrainedModel, inputs: dict, strategy: SpeculativeDecoding, **settings):
    torch.manual_seed(4)
    output = target.generate(**inputs, custom_generate=strategy, **settings)
    return output, torch.get_rng_state()


@pytest.mark.parametrize(("model_type", "rows", "settings"), all_pairs(MODEL_TYPES, [1, 4, 8], SETTINGS))
def test_equals_stock(model_type: str, rows: int, settings: str):
    target, drafts = models(model_type)
    inputs, chosen = prompts(rows), SETTINGS[settings] | {"max_new_tokens": NEW_TOKENS}
    expected, state = stock(target, inputs, **chosen)
    width = inputs["input_ids"].shape[1]
    assert min(len(set(row.tolist())) for row in expected[:, width:]) >= 5
    for name, draft in drafts.items():
        for num_draft_tokens in (1, 4, 7):
            strategy = SpeculativeDecoding(draft, num_draft_tokens=num_draft_tokens, verification="coupled")
            output, left = ours(target, inputs, strategy, **chosen)
            assert torch.equal(output, expected), (name, num_draft_tokens)
            assert torch.equal(left, state), (name, num_draft_tokens)


@pytest.mark.parametrize(("model_type", "settings", "num_draft_tokens"), all_pairs(MODEL_TYPES, SETTINGS, [1, 4, 7]))
def test_equal_draft_needs_few_target_forwards(model_type: str, settings: str, num_draft_tokens: int):
    target, _ = models(model_type)
    twin = near(target, 0.0)
    strategy = SpeculativeDecoding(twin, num_draft_tokens=num_draft_tokens, verification="coupled")
    with Forwards(target) as forwards:
        ours(target, prompts(4), strategy, **SETTINGS[settings], max_new_tokens=NEW_TOKENS)
    prompt, *rounds = forwards.lengths
    assert prompt == 11
    assert len(rounds) <= math.ceil((NEW_TOKENS - 1) / (num_draft_tokens + 1))


def outcomes(fed: list[torch.Tensor], output: torch.Tensor) -> list[list[int]]:
    """Accepted candidates of each row in each round, from what hooks saw the target being fed and from the text."""
    text, ends, rounds = output[:, 11:], [1] * len(output), []
    for tokens in fed:
        going = [row for row, end in enumerate(ends) if end < NEW_TOKENS]
        assert len(tokens) == len(going)
        counts = []
        for row, (last, *candidates) in zip(going, tokens.tolist(), strict=True):
            assert last == text[row, ends[row] - 1]
            follows = text[row, ends[row] :].tolist()
            kept = next((i for i, c in enumerate(candidates) if [c] != follows[i : i + 1]), len(candidates))
            counts.append(kept)
            ends[row] += kept + 1
        rounds.append(counts)
    return rounds


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_near_drafts_see_every_outcome(model_type: str):
    """Rejections, full acceptances and unequal rounds all occur, else the grid above would show little; by hooks."""
    target, drafts = models(model_type)
    rounds = []
    for settings in SETTINGS.values():
        strategy = SpeculativeDecoding(drafts["near"], num_draft_tokens=4, verification="coupled")
        with Forwards(target) as forwards:
            output, _ = ours(target, prompts(4), strategy, **settings, max_new_tokens=NEW_TOKENS)
        rounds += outcomes(forwards.ids[1:-4], output)  # the prompt is no round, and the last ones draft less
    assert any(count < 4 for counts in rounds for count in counts)
    assert any(count == 4 for counts in rounds for count in counts)
    assert any(len(set(counts)) > 1 for counts in rounds)


@pytest.mark.parametrize(("model_type", "settings", "pad"), all_pairs(MODEL_TYPES, SETTINGS, PADS))
def test_end_and_pad_tokens(model_type: str, settings: str, pad: str):
    """Rows end at different steps; ends are never read off ids that may be pads."""
    target, drafts = models(model_type)
    inputs, chosen = prompts(8), SETTINGS[settings] | {"max_new_tokens": 60}
    free, _ = stock(target, inputs, **chosen)
    common = torch.bincount(free[:, 11:].flatten(), minlength=VOCAB_SIZE).argsort(descending=True).tolist()
    eos = [common[3], common[8]]
    chosen |= {"eos_token_id": eos, "pad_token_id": eos[0] if pad == "equal to the end token" else common[0]}
    expected, state = stock(target, inputs, **chosen)
    ends = torch.isin(expected[:, 11:], torch.tensor(eos)).int().argmax(-1)
    assert len(set(ends.tolist())) > 2
    for draft in drafts.values():
        strategy = SpeculativeDecoding(draft, num_draft_tokens=4, verification="coupled")
        output, left = ours(target, inputs, strategy, **chosen)
        assert torch.equal(output, expected)
        assert torch.equal(left, state)


@pytest.mark.parametrize("noise_window", [0, 1])
def test_eager_attention_and_noise_that_is_drawn_again(noise_window: int, monkeypatch: pytest.MonkeyPatch):
    """Eager attention takes the same masks; noise that was dropped comes back from its saved state."""
    monkeypatch.setattr(run, "NOISE_WINDOW", noise_window)
    target = tiny("mistral", attn_implementation="eager")
    inputs, chosen = prompts(4), SETTINGS["plain"] | {"max_new_tokens": NEW_TOKENS}
    expected, state = stock(target, inputs, **chosen)
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4, verification="coupled")
    output, left = ours(target, inputs, strategy, **chosen)
    assert torch.equal(output, expected)
    assert torch.equal(left, state)


def mask_off_by_one(self: Masks, slots: torch.Tensor, *others):
    return MASK(self, slots - 1, *others)


def positions_off_by_one(self: RaggedDecoder, batch: Batch, emitted: torch.Tensor, *others):
    return POSITIONS(self, batch, emitted + 1, *others)


def cut_one_late(self: Stopping, batch: Batch, tokens: list[list[int]], gained: list[int], stops: list[list[bool]]):
    kept = CUT(self, batch, tokens, gained, stops)
    self.stopped_at = {row: count + 1 for row, count in self.stopped_at.items()}
    return [min(number + 1, most) for number, most in zip(kept, gained, strict=True)]


def noise_of_another_row(self: StockNoise, batch: Batch, probs: torch.Tensor, ahead: int):
    return NOISE(self, batch, probs, ahead).roll(1, 0)


MASK, POSITIONS, CUT, NOISE = (
    Masks.__call__,
    RaggedDecoder._positions,
    Stopping.cut,
    StockNoise.at,
)
FAULTS = {
    "mask": (Masks, "__call__", mask_off_by_one),
    "position": (RaggedDecoder, "_positions", positions_off_by_one),
    "stop": (Stopping, "cut", cut_one_late),
    "noise": (StockNoise, "at", noise_of_another_row),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch):
    """The tests above can fail: each of these errors gives other tokens."""
    target, drafts = models("llama")
    inputs, chosen = prompts(4), SETTINGS["plain"] | {"max_new_tokens": NEW_TOKENS, "eos_token_id": list(range(1, 9))}
    expected, _ = stock(target, inputs, **chosen)
    monkeypatch.setattr(*FAULTS[fault])
    strategy = SpeculativeDecoding(drafts["near"], num_draft_tokens=4, verification="coupled")
    output, _ = ours(target, inputs, strategy, **chosen)
    assert not torch.equal(output, expected)
