"""The workflow on GitHub: it loads, what it runs is there, and its versions are those of pyproject.toml."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml


ROOT = Path(__file__).parents[2]


@pytest.fixture
def workflow() -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))


def commands(workflow: dict[str, Any]) -> dict[str, str]:
    """The lines that each job runs."""
    jobs = workflow["jobs"].items()
    return {name: "\n".join(step["run"] for step in job["steps"] if "run" in step) for name, job in jobs}


def test_every_script_that_it_names_exists(workflow):
    for job, lines in commands(workflow).items():
        subprocess.run(["bash", "-n"], input=lines, text=True, check=True)
        scripts = re.findall(r"[\w./]+\.sh|\.ci/\w+", lines)
        assert scripts, job
        for script in scripts:
            assert (ROOT / script).is_file(), script


def test_a_push_and_a_pull_request_run_everything_but_the_gpu(workflow):
    triggers = workflow[True]  # YAML 1.1 reads "on" so
    assert {"push", "pull_request"} <= triggers.keys()
    assert ".ci/run" in commands(workflow)["all"]
    assert "scripts/gpu.sh" in commands(workflow)["gpu"]
    assert triggers["workflow_dispatch"]["inputs"]["gpu"]["default"] is False
    assert {name for name, job in workflow["jobs"].items() if "inputs.gpu" in job.get("if", "")} == {"gpu"}


def test_the_oldest_torch_is_the_one_that_pyproject_allows(workflow):
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    assert workflow["jobs"]["versions"]["strategy"]["matrix"]["torch"] == [f"torch=={oldest}.0", "torch"]
