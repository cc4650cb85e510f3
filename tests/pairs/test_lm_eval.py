"""The model of lm-eval: texts and loglikelihoods are those of its own model of transformers, in fewer forwards.

As a process it is asked by a task of our own, since there is no network.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Forwards
from tiny_tokenizer import saved

from hf_specx import DraftTargetPair
from hf_specx.hub.known_pairs import embedded_folder


pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hf_specx.pairs.lm_eval_model import SpeculativeLM


pytestmark = pytest.mark.filterwarnings("ignore")
HOW = {"device": "cpu", "dtype": "float32"}
UNTIL = {"until": ["\n\n", "return"], "max_gen_toks": 40}
ASKED = [
    ("def read(", UNTIL),
    ("import os", {"until": ["\n"]}),
    ("class A:\n    def", UNTIL),
    ("for line in", UNTIL),
    ("if x", {"until": [], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}),
]
SAMPLED = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": True, "temperature": 0.7}
TASK = """
task: ours
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
"""


def requests(asked: list[tuple[str, Any]], kind: str = "generate_until") -> list[Instance]:
    return [Instance(kind, {}, arguments, number) for number, arguments in enumerate(asked)]


@pytest.fixture(scope="module")
def plain() -> HFLM:
    return HFLM(str(embedded_folder()), batch_size=1, **HOW)


@pytest.mark.parametrize(("batch_size", "more"), [(1, {}), (3, {}), ("4", {"draft": "suffix", "num_draft_tokens": 6})])
def test_texts_are_those_of_the_model_hf(plain: HFLM, batch_size: Any, more: dict):
    """Until one of several strings, or a limit; with another group of options in between."""
    expected = plain.generate_until(requests(ASKED), disable_tqdm=True)
    ours = SpeculativeLM("embedded", batch_size=batch_size, **HOW, **more)
    with Forwards(ours.model) as forwards:
        assert ours.generate_until(requests(ASKED), disable_tqdm=True) == expected
    assert ours.report is not None
    assert ours.report.accepted > 0
    assert len(forwards.ids) < sum(ours.report.emitted_per_row)
    assert ours.get_model_info()["speculation"]["emitted"] == ours.report.emitted


def test_loglikelihoods_are_those_of_the_target(plain: HFLM):
    pairs = requests([("def read(", "self):"), ("import", " os")], "loglikelihood")
    ours = SpeculativeLM("embedded", batch_size=2, **HOW)
    for (one, best), (other, other_best) in zip(plain.loglikelihood(pairs), ours.loglikelihood(pairs), strict=True):
        assert (one, best) == (pytest.approx(other, abs=1e-4), other_best)
    assert ours.report is None


def test_sampled_texts_follow_from_the_seed(tmp_path: Path):
    """Of any batch size, for a pair in a folder too; in float64, since rounding differs between batches."""
    DraftTargetPair.embedded().save_pretrained(tmp_path / "pair")
    texts = []
    for batch_size in (1, 3):
        ours = SpeculativeLM(
            str(tmp_path / "pair"), batch_size=batch_size, num_draft_tokens=3, device="cpu", dtype="float64"
        )
        torch.manual_seed(4)
        texts.append(ours.generate_until(requests([(x, SAMPLED) for x, _ in ASKED[:3]]), disable_tqdm=True))
    assert texts[0] == texts[1]
    torch.manual_seed(5)
    assert ours.generate_until(requests([(x, SAMPLED) for x, _ in ASKED[:3]]), disable_tqdm=True) != texts[0]


def test_what_is_refused(tmp_path: Path):
    """A target without a draft; a context that the target cannot read."""
    folder = saved(tmp_path / "target", DraftTargetPair.embedded().target, DraftTargetPair.embedded().tokenizer)
    with pytest.raises(ValueError, match="draft=suffix"):
        SpeculativeLM(folder, **HOW)
    ours = SpeculativeLM(folder, draft="suffix", **HOW)
    with pytest.raises(ValueError, match="leaves no room"):
        ours.generate_until(requests([("a", {"until": [], "max_gen_toks": 100_000})]), disable_tqdm=True)
    (text,) = ours.generate_until(requests([("a " * 3000, {"until": ["\n"], "max_gen_toks": 4})]), disable_tqdm=True)
    assert isinstance(text, str)


@pytest.mark.slow
def test_a_process_evaluates_by_its_name(tmp_path: Path):
    """`specx lm-eval` gives the score that lm-eval's own model has, with what was drafted beside it."""
    documents = [{"prompt": prompt, "target": "x"} for prompt, _ in ASKED]
    (tmp_path / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "ours.yaml").write_text(TASK % (tmp_path / "documents.jsonl"))
    found = {}
    for name, arguments in {"hf": str(embedded_folder()), "hf-specx": "embedded,num_draft_tokens=4"}.items():
        out = tmp_path / name
        line = (
            f"--model {name} --model_args pretrained={arguments},dtype=float32 --tasks ours --include_path {tmp_path} "
        )
        line += f"--batch_size 3 --device cpu --output_path {out} --log_samples"
        command = [sys.executable, "-m", "hf_specx", "lm-eval", *line.split()]
        environment = os.environ | {"HF_HOME": str(tmp_path / "home")}
        process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert process.returncode == 0, process.stderr[-3000:]
        (samples,) = out.rglob("samples_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        texts = [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
        (results,) = out.rglob("results_*.json")
        found[name] = texts, json.loads(results.read_text())
    assert found["hf"][0] == found["hf-specx"][0]
    assert (
        found["hf"][1]["results"]["ours"]["exact_match,none"]
        == found["hf-specx"][1]["results"]["ours"]["exact_match,none"]
    )
    assert found["hf-specx"][1]["config"]["speculation"]["alpha"] > 0
