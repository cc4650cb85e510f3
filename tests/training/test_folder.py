"""The folder of a training: how an interrupted one goes on in it, and that nothing of others is touched."""

import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError
from tiny import tiny
from training_cases import Stop, same, some_prompts, trained, weights
from transformers import TrainerCallback

from hf_specx.training.folder import CHECKPOINTS, COMPLETE, SETTINGS_FILE, explained_lack_of_room, last_checkpoint


TUNED = ["settings.json", "checkpoint-best/model.safetensors", "thesis.tex"]


@pytest.mark.parametrize("names", [TUNED[:1], TUNED, ["texts/validation.json"]], ids=str)
def test_the_folder_of_somebody_else_is_refused_and_left_as_it_is(tmp_path, names: list[str]):
    """As that of the target's own fine-tuning: no file is deleted, written over or added."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"mine": true}')
    with pytest.raises(ValueError, match="other files"):
        trained(folder=tmp_path)
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == sorted(names)
    assert all((tmp_path / name).read_text() == '{"mine": true}' for name in names)


TRAINS = """
import sys
from pathlib import Path
from hf_specx.training.folder import locked_folder
with locked_folder(Path(sys.argv[1])):
    print("begun", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def training_elsewhere(tmp_path):
    """Another process that trains in a folder, until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINS, tmp_path / "training"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"begun\n"
    yield process
    process.kill()
    process.wait()


def test_one_process_at_a_time_trains_in_a_folder(tmp_path, training_elsewhere):
    """The second one says who is there, and touches nothing; it has its turn once that process is gone, or killed."""
    folder, pid = tmp_path / "training", training_elsewhere.pid
    half = folder / CHECKPOINTS / "checkpoint-10" / "model.safetensors"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    (folder / SETTINGS_FILE).write_text("{}")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for _ in range(2):
        with pytest.raises(ValueError, match=f"process {pid}"):
            trained(folder=folder, phases=1)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    training_elsewhere.kill()
    training_elsewhere.wait()
    assert trained(folder=folder, phases=1).alphas == trained(phases=1).alphas


def test_checkpoints_of_others_beside_a_training_are_left_alone(tmp_path):
    """And copies under another name are none to go on from."""
    first = trained(folder=tmp_path, phases=1)
    (last,) = tmp_path.rglob("checkpoint-*")
    shutil.copytree(last, last.with_name("checkpoint-best"))
    other = tmp_path / "checkpoint-5" / "model.safetensors"
    other.parent.mkdir()
    other.write_text("mine")
    assert trained(folder=tmp_path, phases=1).alphas == first.alphas
    assert other.read_text() == "mine"


INTERRUPTED = {  # how a draft is trained, and the steps in which that ends
    "several times": ({}, [2, 5, 12]),
    "dropout": ({"target": tiny("gpt2", initializer_range=0.2), "draft": "layers:1", "phases": 2}, [6]),
    "lora": ({"lora": 4, "learning_rate": 2e-2, "phases": 2}, [6]),
    "patience": ({"learning_rate": 5.0, "phases": 9, "patience": 2}, [6]),
    "blocks": ({"draft": "dspark", "phases": 2}, [6]),
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.parametrize("kind", INTERRUPTED)
def test_an_interrupted_training_goes_on_to_the_same_weights(tmp_path, kind: str):
    """With random numbers, adapters, for how long α has not risen, and which blocks of a text come; not with texts."""
    if kind == "lora":
        pytest.importorskip("peft")
    options, steps = INTERRUPTED[kind]
    undisturbed = trained(**options)
    assert len(undisturbed.alphas) == 3 or not options
    for step in steps:
        with pytest.raises(KeyboardInterrupt):
            trained(folder=tmp_path, callbacks=[Stop(step)], **options)
        shutil.rmtree(tmp_path / "texts")
    again = trained(folder=tmp_path, **options)
    assert same(weights(again.pair.draft), weights(undisturbed.pair.draft))
    assert (again.alphas, again.after) == (undisturbed.alphas, undisturbed.after)


def test_a_checkpoint_that_is_half_written_does_not_count(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trained(folder=tmp_path, callbacks=[Stop(10)])
    last = max((tmp_path / CHECKPOINTS).iterdir(), key=lambda path: int(path.name[11:]))
    (last / COMPLETE).unlink()
    (last / "trainer_state.json").write_text("{")
    assert same(weights(trained(folder=tmp_path).pair.draft), weights(trained().pair.draft))


def test_a_phase_that_was_told_of_is_kept(tmp_path):
    def stop(doing, done, total):
        if doing.startswith("phase 1 of"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(folder=tmp_path, progress=stop)
    assert last_checkpoint(tmp_path) is not None


def test_a_checkpoint_in_the_middle_of_a_phase_is_none_to_go_on_from(tmp_path):
    """Such as a callback of the user's own asks for."""

    class Save(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_save = state.global_step == 1

        def on_save(self, args, state, control, **_):
            if state.global_step == 1:
                raise KeyboardInterrupt

    updates = []
    with pytest.raises(KeyboardInterrupt):
        trained(folder=tmp_path, callbacks=[Save()], progress=lambda *update: updates.append(update))
    assert all(activity for activity, _, _ in updates)
    assert same(weights(trained(folder=tmp_path).pair.draft), weights(trained().pair.draft))


@pytest.mark.parametrize(
    "options", [{"phases": 1}, {"learning_rate": 5.0, "phases": 9, "patience": 2}], ids=["all", "stopped"]
)
def test_a_finished_training_is_not_trained_further(tmp_path, options):
    """After all of its phases, or as α no longer rose."""
    first = trained(folder=tmp_path, **options)
    updates = []
    again = trained(folder=tmp_path, progress=lambda *update: updates.append(update), **options)
    assert [update for update in updates if "writing" in update[0] or "training" in update[0]] == []
    assert updates == [(f"phase {len(first.alphas) - 1} of {options['phases']}, α {first.alphas[-1]:.3f}", 0, 0)]
    assert same(weights(again.pair.draft), weights(first.pair.draft))
    assert (again.alphas, again.steps) == (first.alphas, first.steps)


def test_another_training_does_not_go_on_in_the_same_folder(tmp_path):
    trained(folder=tmp_path, phases=1)
    ends_otherwise = tiny(initializer_range=0.2)
    ends_otherwise.generation_config.eos_token_id = 7
    others = {"loss": "total_variation", "prompts": some_prompts(seed=1), "target": ends_otherwise, "seed": 1}
    for name, value in others.items():
        with pytest.raises(ValueError, match=f"another {name}"):
            trained(folder=tmp_path, phases=1, **{name: value})


def test_settings_may_change_before_the_first_checkpoint(tmp_path):
    """As after an error that said what to lower: the texts are there already."""
    (tmp_path / SETTINGS_FILE).with_suffix(".part").write_text("{")  # of a process that was killed at once
    with pytest.raises(KeyboardInterrupt):
        trained(folder=tmp_path, phases=1, callbacks=[Stop(2)])
    doing = []
    result = trained(folder=tmp_path, batch_size=4, phases=1, progress=lambda what, *_: doing.append(what))
    assert "phase 1, writing" not in doing
    assert same(weights(result.pair.draft), weights(trained(batch_size=4, phases=1).pair.draft))


ERRORS = {
    "memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    "make room and start again": OSError(28, "No space left on device"),
    "the disk of .* is full": SafetensorError("Error while serializing: I/O error: No space left on device"),
    "is full": RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/3"),
    "another": OSError("another"),
}


@pytest.mark.parametrize("message", ERRORS)
def test_memory_or_disk_that_runs_out(tmp_path, message: str):
    with (
        pytest.raises(OSError if message == "another" else ValueError, match=message),
        explained_lack_of_room(tmp_path, 8),
    ):
        raise ERRORS[message]


def test_memory_that_runs_out_in_a_step():
    with pytest.raises(ValueError, match="batch_size=8"):
        trained(callbacks=[Stop(1, torch.OutOfMemoryError("CUDA out of memory. Tried"))])
