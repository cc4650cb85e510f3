"""transformers' own generation tests with a strategy behind every call: what passes without passes with one.

They are no part of its package: `SPECX_TRANSFORMERS_CHECKOUT` is the folder of a checkout, of the version installed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest


TYPES = """
    llama mistral mixtral qwen2 qwen3 qwen3_moe qwen3_next gemma gemma2 phi phi3 gpt2 gpt_neox gpt_neo gptj gpt_bigcode
    opt bloom falcon mpt stablelm starcoder2 olmo olmo2 cohere granite deepseek_v3 glm helium biogpt codegen xglm bart
    t5 mbart pegasus blenderbot marian m2m_100 led prophetnet whisper mamba mamba2 jamba bamba falcon_h1 lfm2 rwkv
    openai
""".split()  # noqa: SIM905
CHOSEN = "(generat or greedy or sample or beam or decoding) and not compil and not assisted and not lookup"
SUPPORT = Path(__file__).parents[1] / "support"


def passed(checkout: Path, results: Path, *options: str) -> tuple[set[str], str]:
    """The tests that pass, and what was printed."""
    files = [f"tests/models/{name}/test_modeling_{name}.py" for name in TYPES]
    files = [file for file in files if (checkout / file).exists()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        *options,
        *files,
    ]
    paths = os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, "-k", CHOSEN, f"--junitxml={results}"],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    cases = ElementTree.parse(results).iter("testcase")
    good = [case for case in cases if not any(case.find(name) is not None for name in ("failure", "error", "skipped"))]
    return {f"{case.get('classname')}::{case.get('name')}" for case in good}, run.stdout


@pytest.mark.slow
def test_what_passes_without_a_strategy_passes_with_one(tmp_path: Path):
    folder = os.environ.get("SPECX_TRANSFORMERS_CHECKOUT")
    if not folder:
        pytest.skip("SPECX_TRANSFORMERS_CHECKOUT names no checkout of transformers, whose wheel has no tests")
    without, _ = passed(Path(folder), tmp_path / "without.xml")
    served, printed = passed(Path(folder), tmp_path / "with.xml", "-p", "strategy_behind")
    types = {re.sub(r".*test_modeling_(\w+)\..*", r"\1", name) for name in without}
    assert len(types) >= 30
    assert sorted(without - served) == []
    counts = dict(re.findall(r"'(\w+)': (\d+)", printed))
    assert int(counts["ragged"]) > 100
    assert int(counts["accepted"]) > 1000
