"""The folder of a training: what is deleted there, and what is not."""

import shutil

import pytest
from training_cases import models, trained


def test_checkpoints_of_others_are_left_alone(tmp_path):
    """As in the folder of the target's own fine-tuning."""
    other = tmp_path / "checkpoint-5" / "model.safetensors"
    other.parent.mkdir()
    other.touch()
    with pytest.raises(ValueError, match=r"has no training to go on with, but other files .*checkpoint-5"):
        trained(folder=tmp_path)
    assert other.is_file()


def test_checkpoints_that_are_there_need_no_more_room(tmp_path, monkeypatch):
    """A training goes on where there is room for one more checkpoint, and does not begin there."""
    weights = models()[1].num_parameters() * 4
    trained(folder=tmp_path / "begun")
    free = 5 * weights
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))
    with pytest.raises(ValueError, match="are free; make room"):
        trained(folder=tmp_path / "new")
    assert trained(folder=tmp_path / "begun").alphas
