"""Models whose past is a state: put back as it was, and fed again what was accepted since."""

import pytest
import torch
import zoo
from all_pairs import all_pairs
from sweep import MODES
from tiny import Forwards, near
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_specx import SpeculativeDecoding
from hf_specx.common.architectures import INEXACT
from hf_specx.common.batch import Batch
from hf_specx.models.choose import layouts_of
from hf_specx.models.lockstep import LockstepDecoder
from hf_specx.models.prompts import prepare


STATEFUL = (
    "mamba2",
    "bamba",
    "granitemoehybrid",
    "zamba2",
    "nemotron_h",
    "qwen3_next",
    "kimi_linear",
    "olmo_hybrid",
    "lfm2",
)
NEW_TOKENS = 24


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize(("model_type", "mode", "rows"), all_pairs(STATEFUL, MODES, [1, 4]))
def test_equals_stock(model_type: str, mode: str, rows: int):
    target = zoo.build("causal", model_type)
    inputs, settings = zoo.inputs(target, rows), MODES[mode] | {"max_new_tokens": NEW_TOKENS}
    torch.manual_seed(0)
    expected = target.generate(**inputs, **settings)
    for noise in (0.0, 0.02, 0.3):
        strategy = SpeculativeDecoding(near(target, noise), num_draft_tokens=4, verification="coupled")
        torch.manual_seed(0)
        with Forwards(target) as forwards:
            output = target.generate(**inputs, **settings, custom_generate=strategy)
        assert torch.equal(output, expected)
        rounds = strategy.report.rounds
        # the prompt, and at the end perhaps a single step; convolutions alone are cropped, else what was accepted of a
        # round is fed again
        assert len(forwards.lengths) <= 2 + (rounds if model_type == "lfm2" else 2 * rounds)
    assert strategy.report.accepted < strategy.report.drafted


def decoder(model_type: str) -> tuple[LockstepDecoder, Batch]:
    model = zoo.build("causal", model_type)
    prompt = prepare(model, NEW_TOKENS, zoo.inputs(model))
    return LockstepDecoder(prompt), Batch(prompt.input_ids, prompt.kwargs["attention_mask"], 0)


def emit(batch: Batch, tokens: torch.Tensor) -> None:
    batch.emit(tokens, [tokens.shape[1]] * len(tokens))


def logits_in_steps(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Six greedy tokens of stock and the logits [B, 6, V] that they were chosen by."""
    output = model.generate(
        **zoo.inputs(model), do_sample=False, max_new_tokens=6, return_dict_in_generate=True, output_logits=True
    )
    return output.sequences[:, -6:], torch.stack(output.logits, 1)


def logits_at_once(model_type: str) -> torch.Tensor:
    """The same logits, when five of the tokens are fed in one forward behind the prompt."""
    lockstep, batch = decoder(model_type)
    tokens, _ = logits_in_steps(lockstep.model)
    with torch.no_grad():
        lockstep.read()
        emit(batch, tokens[:, :5])
        return torch.cat([lockstep.after_prompt, lockstep.feed(batch, 5, 0, 5)], 1)


@pytest.mark.parametrize("model_type", STATEFUL)
def test_several_tokens_at_once_give_the_logits_of_single_steps(model_type: str):
    _, expected = logits_in_steps(zoo.build("causal", model_type))
    torch.testing.assert_close(logits_at_once(model_type), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "jamba", "zamba"])
def test_where_they_do_not_the_target_is_refused(model_type: str):
    """If this fails because transformers has become right, the type belongs into the sweep again."""
    model = zoo.build("causal", model_type)
    _, expected = logits_in_steps(model)
    assert (logits_at_once(model_type) - expected).abs().max() > 1e-3
    assert model_type in INEXACT
    with pytest.raises(ValueError, match=f"model type '{model_type}' cannot be a target.*other logits than single"):
        model.generate(**zoo.inputs(model), custom_generate=SpeculativeDecoding(near(model, 0.0)), max_new_tokens=4)
    assert layouts_of(model, drafts=True) == ["lockstep"]


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize("model_type", sorted(INEXACT))
def test_as_a_draft_any_of_them_serves(model_type: str):
    """Whatever distribution a draft has, its candidates are judged by it."""
    target, draft = zoo.build("causal", "llama"), zoo.build("causal", model_type)
    settings = MODES["coupled"] | {"max_new_tokens": NEW_TOKENS}
    torch.manual_seed(0)
    expected = target.generate(**zoo.inputs(target), **settings)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification="coupled")
    torch.manual_seed(0)
    assert torch.equal(target.generate(**zoo.inputs(target), **settings, custom_generate=strategy), expected)
    assert strategy.report.drafted > 0


@torch.no_grad()
@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next"])
def test_after_a_rollback_the_states_are_those_of_the_text(model_type: str, accepted: int):
    """However many of four candidates stay, the next logits and states are those without any rejected candidate."""
    kept, batch = decoder(model_type)
    tokens, _ = logits_in_steps(kept.model)
    kept.read()
    emit(batch, tokens[:, :1])
    batch.put(
        tokens[:, 1:5].roll(1, 0)
        if accepted == 0
        else torch.cat([tokens[:, 1 : 1 + accepted], tokens[:, : 4 - accepted]], 1)
    )
    kept.feed(batch, 5, 4, 5)
    emit(batch, tokens[:, 1 : 2 + accepted])
    logits = kept.feed(batch, 1, 0, 1)

    plain, alone = decoder(model_type)
    plain.read()
    for step in range(2 + accepted):
        emit(alone, tokens[:, step : step + 1])
        expected = plain.feed(alone, 1, 0, 1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    for ours, theirs in zip(kept.cache.layers, plain.cache.layers, strict=True):
        if isinstance(ours, LinearAttentionCacheLayerMixin):
            for number, state in theirs.recurrent_states.items():
                torch.testing.assert_close(ours.recurrent_states[number], state, rtol=1e-4, atol=1e-4)
