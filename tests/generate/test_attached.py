"""`strategy.attached(model)`: for code that calls `model.generate`, also while the model trains without dropout."""

from pathlib import Path

import pytest
import torch
from tiny import Forwards, near, prompts, tiny
from transformers import StoppingCriteria

from hf_specx import DraftTargetPair, SpeculativeDecoding


SAMPLED = {"do_sample": True, "max_new_tokens": 20, "pad_token_id": 0}


def text(model, **options) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(**prompts(3), **SAMPLED | options)


def test_generate_is_speculative_within():
    target = tiny()
    expected, before = text(target), dict(vars(target))
    strategy = SpeculativeDecoding(near(target, 0.1), num_draft_tokens=4, verification="coupled")
    with strategy.attached(target) as same, Forwards(target) as forwards:
        assert same is target
        assert torch.equal(text(target), expected)
    assert len(forwards.ids) < 20
    assert strategy.report.emitted == 60
    assert vars(target) == before


def test_one_context_within_another_and_an_error():
    target = tiny()
    outer, inner = (SpeculativeDecoding(near(target, 0.1), num_draft_tokens=2) for _ in range(2))
    with outer.attached(target):
        with inner.attached(target):
            text(target)
        assert outer.report is None
        text(target)
    assert outer.report.emitted == inner.report.emitted == 60
    with pytest.raises(ZeroDivisionError), outer.attached(target):
        raise ZeroDivisionError
    assert "generate" not in vars(target)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_model_that_trains_without_dropout(model_type: str):
    """Its weights change between calls, and each call takes those of the moment."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if model_type == "gpt2" else {}
    target = tiny(model_type, **none)
    draft = near(target, 0.1)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=4, verification="coupled")
    target.train()
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    for _ in range(2):
        expected = text(target)
        with strategy.attached(target), Forwards(target) as forwards:
            assert torch.equal(text(target), expected)
        assert len(forwards.ids) < 20
        assert target.training
        ids = prompts(3)["input_ids"]
        target(ids, labels=ids).loss.backward()
        optimizer.step()
        assert not torch.equal(text(target), expected)


class MultiTokenEOSCriteria(StoppingCriteria):
    """As lm-eval has it, with tokens in place of texts: the batch ends once all rows have had the sequence."""

    def __init__(self, sequence: list[int], width: int, rows: int):
        self.sequence, self.width, self.done_tracker = sequence, width, [False] * rows

    def __call__(self, input_ids, scores, **kwargs):
        for row, text in enumerate(input_ids[:, self.width :].tolist()):
            self.done_tracker[row] |= text[-len(self.sequence) :] == self.sequence
        return False not in self.done_tracker


def test_stop_sequences_of_lm_eval():
    """One row is speculated; of several, which end together, transformers decodes."""
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4, verification="coupled")
    sequence = text(target)[0, 17:19].tolist()
    for rows in (1, 3):
        call = prompts(rows) | SAMPLED

        def run(rows: int = rows, call: dict = call) -> torch.Tensor:
            torch.manual_seed(0)
            criteria = [MultiTokenEOSCriteria(each, 11, rows) for each in (sequence, [47, 47])]
            return target.generate(**call, stopping_criteria=criteria)

        expected = run()
        with strategy.attached(target), Forwards(target) as forwards:
            assert torch.equal(run(), expected)
        assert (len(forwards.ids) < expected.shape[1] - 11) == (rows == 1)
        assert strategy.report.layout == ("ragged" if rows == 1 else "plain")
        assert strategy.report.layout_reason.count("MultiTokenEOSCriteria") == (rows > 1)


@pytest.mark.slow
def test_lm_eval_gets_the_same_texts():
    """Requests by hand, as its tasks make them."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    pair = DraftTargetPair.embedded()
    model = huggingface.HFLM(pretrained=pair.target, tokenizer=pair.tokenizer, batch_size=1)
    asked = [("def read(", {"until": ["\n\n", "return"], "max_gen_toks": 40}), ("import os", {"until": ["\n"]})]
    requests = [instance("generate_until", {}, arguments, index) for index, arguments in enumerate(asked)]
    expected = model.generate_until(requests, disable_tqdm=True)
    strategy = SpeculativeDecoding(pair.draft, num_draft_tokens=4)
    with Forwards(pair.target) as plain:
        model.generate_until(requests, disable_tqdm=True)
    with strategy.attached(pair.target), Forwards(pair.target) as forwards:
        assert model.generate_until(requests, disable_tqdm=True) == expected
    assert len(forwards.ids) < 0.8 * len(plain.ids)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_samples_by_it(tmp_path: Path):
    """GRPO trains the embedded target for two steps, with its rollouts drafted."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    pair, reports = DraftTargetPair.embedded(), []
    strategy = SpeculativeDecoding(pair.draft, verification="coupled", num_draft_tokens=4)

    def reward(completions, **_):
        reports.append(strategy.report)
        return [float(len(text)) for text in completions]

    sizes = {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 16}
    plain = {"gradient_checkpointing": False, "bf16": False, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    trainer = trl.GRPOTrainer(
        model=pair.target,
        reward_funcs=reward,
        args=trl.GRPOConfig(output_dir=str(tmp_path), learning_rate=1e-3, **sizes, **plain),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["The sky", "One day", "He said", "She went"]}),
        processing_class=pair.tokenizer,
    )
    before = pair.target.lm_head.weight.detach().clone()
    with strategy.attached(pair.target):
        trainer.train()
    assert len(reports) == 2
    assert reports[0] is not reports[1]
    assert all(report.rows == 4 and report.accepted > 0 for report in reports)
    assert not torch.equal(pair.target.lm_head.weight, before)
    assert "generate" not in vars(pair.target)
