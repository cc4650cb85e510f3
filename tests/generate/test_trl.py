"""TRL's GRPO trains the embedded target for two steps, with its rollouts drafted."""

import pytest
import torch

from hf_specx import DraftTargetPair, SpeculativeDecoding


trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_grpo_samples_through_an_attached_strategy(tmp_path):
    pair = DraftTargetPair.embedded()
    strategy = SpeculativeDecoding(pair.draft, verification="coupled", num_draft_tokens=4)
    prompts = datasets.Dataset.from_dict({"prompt": ["The sky", "One day", "He said", "She went"]})
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        learning_rate=1e-3,
    )
    reports = []

    def reward(completions, **_):
        reports.append(strategy.report)
        return [float(len(text)) for text in completions]

    before = pair.target.lm_head.weight.detach().clone()
    trainer = trl.GRPOTrainer(
        model=pair.target, reward_funcs=reward, args=arguments, train_dataset=prompts, processing_class=pair.tokenizer
    )
    with strategy.attached(pair.target):
        trainer.train()
    assert len(reports) == 2
    assert reports[0] is not reports[1]
    assert all(report.rows == 4 and report.accepted > 0 for report in reports)
    assert not torch.equal(pair.target.lm_head.weight, before)
    assert "generate" not in vars(pair.target)
