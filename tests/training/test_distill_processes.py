"""Trainings in processes of their own, which run this file: one that is killed, and two that share the work."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from training_cases import Stop, trained

from hf_specx.pairs.shares import processes


pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(folder: Path, out: Path, how: list[str] = [], **options) -> int:  # noqa: B006
    """The exit status of a training."""
    paths = [HERE.parents[1], HERE, HERE.parent / "support", os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "ACCELERATE_USE_CPU": "1"}
    command = [sys.executable, *how, __file__, str(folder), str(out), json.dumps(options)]
    return subprocess.run(command, env=environment, check=False, timeout=300).returncode


def alphas(path: Path) -> list[float]:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["alphas"])


@pytest.mark.parametrize("options", [{}, {"draft": "eagle3"}, {"draft": "dspark"}], ids=str)
def test_a_killed_training_goes_on_to_the_same_weights(tmp_path, options):
    """By SIGKILL in the middle of the second phase, and again in the third; then as if nothing had happened."""
    assert run(tmp_path / "whole", tmp_path / "whole.safetensors", **options) == 0
    for step in (6, 9):
        assert run(tmp_path / "parts", tmp_path / "no", kill=step, **options) == -signal.SIGKILL
    assert run(tmp_path / "parts", tmp_path / "parts.safetensors", **options) == 0
    whole, parts = (load_file(tmp_path / f"{name}.safetensors-0") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


HOW = {"all weights": {}, "lora": {"lora": 4, "learning_rate": 2e-2}}
HOW |= {"a head": {"draft": "eagle3"}, "blocks": {"draft": "dspark"}}


@pytest.mark.parametrize("options", HOW.values(), ids=HOW)
def test_two_processes_equal_one(tmp_path, options):
    """Each has half of the texts of every step, and writes half: within rounding, and both come to the same."""
    if "lora" in options:
        pytest.importorskip("peft")
    assert run(tmp_path / "one", tmp_path / "one", batch_size=8, **options) == 0
    assert run(tmp_path / "two", tmp_path / "two", TWO, batch_size=4, **options) == 0
    alone, first, second = (load_file(tmp_path / name) for name in ("one-0", "two-0", "two-1"))
    for name, weight in alone.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight, atol=1e-4, rtol=1e-3)
    assert alphas(tmp_path / "two-0") == pytest.approx(alphas(tmp_path / "one-0"), abs=1e-4)
    assert alphas(tmp_path / "one-0")[-1] > alphas(tmp_path / "one-0")[0] + 0.005


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    callbacks = [Stop(options.pop("kill"), signal.SIGKILL)] if "kill" in options else []
    result = trained(folder=folder, callbacks=callbacks, **options)
    tensors = {name: weight.clone() for name, weight in result.pair.draft.state_dict().items()}
    save_file(tensors, f"{out}-{processes().process_index}", {"alphas": json.dumps(result.alphas)})
