"""A target with adapters of PEFT: its `generate` hands over the model inside, and that one decodes."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import WAYS
from head_files import random_head, write
from many import assert_alone
from plain import coupled
from tiny import Forwards, near, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import DraftHead, DraftTargetPair, EarlyExitDraft, Request, SpeculativeDecoding, distill


peft = pytest.importorskip("peft")
GREEDY = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames what peft uses


def adapted(model_type: str = "llama", **options: Any) -> PreTrainedModel:
    """One whose adapter changes the text; its draft is near to the model without."""
    options |= {"r": 4, "fan_in_fan_out": model_type == "gpt2", "target_modules": "all-linear"}
    target = peft.get_peft_model(tiny(model_type), peft.LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05, generator=generator)
    return target.eval()


def by_queue(target, draft, **_):
    return SpeculativeDecoding(draft).generate_many(target, [[1, 2]], **GREEDY)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("call", WAYS)
def test_padded_rows_have_the_text_of_generate(call: Callable, model_type: str):
    target, draft = adapted(model_type), near(tiny(model_type), 0.05)
    assert torch.equal(call(target, draft, **prompts(3), **GREEDY), target.generate(**prompts(3), **GREEDY))


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_requests_have_the_text_of_generate(model_type: str):
    asked = [Request(torch.arange(1, 1 + length), limit) for length, limit in ((3, 9), (8, 20), (5, 14), (1, 20))]
    assert_alone(coupled(tiny(model_type), 0.05), adapted(model_type), asked, batch_size=3, **GREEDY)


HEAD = random_head(layer_ids=(0, 1), draft_vocab=24)
DRAFTS = {
    "model": lambda target, folder: near(tiny(), 0.1),
    "early exit": lambda target, folder: EarlyExitDraft(1),
    "head": lambda target, folder: DraftHead.from_pretrained(write(HEAD, folder), target=target),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_an_adapter_that_is_switched_off_and_on(kind: str, tmp_path: Path):
    """Each call takes the weights that are active, also for a draft that is the target's first layers."""
    target, texts = adapted(), []
    strategy = SpeculativeDecoding(DRAFTS[kind](target, tmp_path), num_draft_tokens=3)
    for without in (False, True, False):
        with target.disable_adapter() if without else nullcontext():
            texts.append(target.generate(**prompts(3), **GREEDY))
            with strategy.attached(target):
                assert torch.equal(target.generate(**prompts(3), **GREEDY), texts[-1])
            assert strategy.report.accepted > 0 or kind == "head"
            assert strategy.report.drafted > 0
    assert torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("call", WAYS)
def test_a_learned_prompt_is_put_before_the_text_by_peft(call: Callable):
    """In a queue there is no `generate` of its own around the forwards, so there it is refused."""
    base = tiny()
    target = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).eval()
    expected = target.generate(**prompts(3), **GREEDY)
    with target.disable_adapter():
        assert not torch.equal(target.generate(**prompts(3), **GREEDY), expected)
    with pytest.warns(UserWarning, match="PromptTuningConfig"):
        assert torch.equal(call(target, near(base, 0.05), **prompts(3), **GREEDY), expected)
    with Forwards(base) as forwards, pytest.raises(ValueError, match="PromptTuningConfig"):
        by_queue(target, near(base, 0.05), **prompts(3), **GREEDY)
    assert not forwards.ids


def test_rows_with_adapters_of_their_own():
    """PEFT's hooks name one for each row of the whole batch, so transformers' own sampler decodes."""
    target, strategy = adapted(), SpeculativeDecoding(near(tiny(), 0.05))
    asked = prompts(3) | GREEDY | {"adapter_names": ["default", "__base__", "default"], "eos_token_id": 17}
    plain = target.generate(**asked)
    assert not torch.equal(plain, target.generate(**asked | {"adapter_names": ["default"] * 3}))
    with pytest.warns(UserWarning, match="adapter_names"):
        assert torch.equal(target.generate(**asked, custom_generate=strategy), plain)


def test_rows_with_tasks_of_their_own():
    """Of Poly, whose hooks have them in a closure."""
    poly = peft.PolyConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], n_tasks=3, n_splits=1)
    target = peft.get_peft_model(tiny(), poly).eval()
    asked = prompts(3) | GREEDY | {"task_ids": torch.arange(3), "eos_token_id": 17}
    with pytest.warns(UserWarning, match="batches"):
        text = target.generate(**asked, custom_generate=SpeculativeDecoding(near(tiny(), 0.05)))
    assert torch.equal(text, target.generate(**asked))


def test_an_adapter_that_begins_at_some_token():
    """PEFT counts from the end of what a forward is given, so a forward over candidates would lack it."""
    target, strategy = adapted(alora_invocation_tokens=[5, 6]), SpeculativeDecoding(near(tiny(), 0.05))
    asked = {"input_ids": torch.tensor([[7, 3, 5, 6, 9, 11]]), "attention_mask": torch.ones(1, 6)} | GREEDY
    plain = target.generate(**asked)
    with target.disable_adapter():
        assert not torch.equal(target.generate(**asked), plain)
    with pytest.warns(UserWarning, match="aLoRA"):
        assert torch.equal(target.generate(**asked, custom_generate=strategy), plain)
    with pytest.raises(ValueError, match="aLoRA"):
        by_queue(target, near(tiny(), 0.05))


def test_what_is_learned_in_a_call_is_kept():
    pair = DraftTargetPair(adapted(), near(tiny(), 0.05))
    pair.generate(**prompts(3), **GREEDY)
    assert pair.strategy.costs.alpha.keys() == {"greedy"}


def test_what_has_adapters_is_merged_before_it_is_saved_or_copied(tmp_path: Path):
    target = adapted()
    with pytest.raises(ValueError, match="merge_and_unload"):
        DraftTargetPair(target, near(tiny(), 0.05)).save_pretrained(tmp_path / "pair")
    with pytest.raises(ValueError, match="merge_and_unload"):
        distill(target, "layers:1", [[1, 2], [3, 4]] * 4)
    assert not list(tmp_path.iterdir())
    DraftTargetPair(target.merge_and_unload(), near(tiny(), 0.05)).save_pretrained(tmp_path / "pair")
