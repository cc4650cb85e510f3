"""The folder of a training: how an interrupted one goes on in it, and that nothing of others is touched."""

import shutil
from pathlib import Path

import pytest
from training_cases import trained


def files_of(folder: Path) -> dict[str, str]:
    """The text of each file, by its path."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "names",
    [
        ["checkpoint-5/model.safetensors"],
        ["settings.json"],
        ["settings.json", "checkpoint-5/model.safetensors"],
        ["settings.json", "checkpoint-best/model.safetensors", "thesis.tex"],
    ],
    ids=str,
)
def test_the_folder_of_somebody_else_is_refused_and_left_as_it_is(tmp_path, names: list[str]):
    """As that of the target's own fine-tuning: no file is deleted, written over or added."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"mine": true}')
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match="has no training to go on with, but other files"):
        trained(folder=tmp_path)
    assert files_of(tmp_path) == before


def test_checkpoints_of_others_beside_a_training_are_left_alone(tmp_path):
    trained(folder=tmp_path, phases=1)
    other = tmp_path / "checkpoint-5" / "model.safetensors"
    other.parent.mkdir()
    other.write_text("mine")
    trained(folder=tmp_path, phases=1)
    assert other.read_text() == "mine"


def test_a_copy_of_a_checkpoint_under_another_name(tmp_path):
    first = trained(folder=tmp_path, phases=1)
    (last,) = tmp_path.rglob("checkpoint-*")
    shutil.copytree(last, last.with_name("checkpoint-best"))
    assert trained(folder=tmp_path, phases=1).alphas == first.alphas
