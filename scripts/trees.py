"""Two trees of this project side by side: one at an earlier commit, in a folder that is removed at the end."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def laid_out(commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        add = ["git", "worktree", "add", "--quiet", "--detach", str(tree), commit]
        subprocess.run(add, cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def worker(script: str, tree: Path, *arguments: str) -> "subprocess.Popen[str]":
    """A process that runs a script as `script worker ...`, and for which `hf_specx` is that of a tree."""
    environment = os.environ | {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", script, "worker", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=tree, stdin=pipe, stdout=pipe, text=True)
