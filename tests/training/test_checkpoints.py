"""The folder of a training: what is deleted there, and what is not."""

import pytest
from training_cases import trained


def test_checkpoints_of_others_are_left_alone(tmp_path):
    """As in the folder of the target's own fine-tuning."""
    other = tmp_path / "checkpoint-5" / "model.safetensors"
    other.parent.mkdir()
    other.touch()
    with pytest.raises(ValueError, match=r"has no training to go on with, but other files .*checkpoint-5"):
        trained(folder=tmp_path)
    assert other.is_file()
