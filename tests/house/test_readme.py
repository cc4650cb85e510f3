"""READMEs: each block of the main one runs as pasted, in order, offline; links lead somewhere; rooms list their files.

The cache of the Hub holds tiny models under the names that the README uses. Its commands run in the process that has
made the imports. What installs something is left out: the scripts at its beginning are what runs these tests.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from head_files import random_head, write
from tiny import near, tiny
from tiny_tokenizer import saved, tiny_tokenizer

from hf_specx import DraftTargetPair
from hf_specx.hub.flatten import PACKAGE
from hf_specx.hub.publish import write_code


ROOT = PACKAGE.parent
README = ROOT / "README.md"
COMMIT = "0" * 40
PROMPTS = "".join(f"def read_{number}(self, file):\n" for number in range(20))
RUNNER = r"""
import pathlib, re, shlex, subprocess, sys
from hf_specx.bench import checks

checks.SECONDS = 1.0  # of turns, which else go on where it is not clear which way is faster
from hf_specx.cli.app import main

def specx(line):
    sys.argv = shlex.split(line, comments=True)
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code

names, text = {}, pathlib.Path(%r).read_text()
for number, (language, block) in enumerate(re.findall(r"(?ms)^```(\w+)\n(.*?)^```$", text)):
    print(f"block {number}:", block, sep="\n", flush=True)
    if language == "python":
        exec(compile(block, f"block {number}", "exec"), names)
    elif language == "bash" and "pip install" not in block and "scripts/" not in block:
        assert "\\\n" not in block
        for line in block.splitlines():
            specx(line) if line.startswith("specx ") else subprocess.run(["bash", "-euc", line], check=True)
print("all ran")
"""


def in_the_cache(home: Path, name: str) -> Path:
    """The folder of a repository in the cache."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    return repository / "snapshots" / COMMIT


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A cache with stand-ins for the README's models, whose texts end soon."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    target = tiny("phi", vocab_size=280, max_position_embeddings=512, num_hidden_layers=3, eos_token_id=0)
    target.lm_head.bias.data[0] = 5.5
    parts = {
        "Qwen/Qwen3-4B": (target, tokenizer),
        "Qwen/Qwen3-0.6B": (near(target, 0.1), tokenizer),
        "HuggingFaceTB/SmolLM2-360M": (tiny(seed=1, vocab_size=280), tiny_tokenizer(["some other words"])),
    }
    for name, both in parts.items():
        saved(in_the_cache(tmp_path, name), *both)
    write(random_head(vocab=280, layer_ids=(0, 1, 2)), in_the_cache(tmp_path, "RedHatAI/Qwen3-4B-speculator.eagle3"))
    pair = in_the_cache(tmp_path, "org/pair")
    DraftTargetPair(target, near(target, 0.1), tokenizer).save_pretrained(pair)
    write_code(pair, "org/pair", COMMIT)
    return tmp_path


def test_every_block_runs_as_pasted(home: Path, tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "prompts.txt").write_text(PROMPTS)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    changed = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PATH": path, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUNNER % str(README)]
    result = subprocess.run(command, cwd=work, env=os.environ | changed, capture_output=True, text=True)
    assert result.stdout.endswith("all ran\n"), result.stdout[-2000:] + result.stderr[-4000:]


def anchors(page: Path) -> set[str]:
    """Those of its headings, as they are made on the web."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


FOLDERS = (".", ".github", "hf_specx/**", "model_cards", "scripts/results")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        file, _, anchor = link.partition("#")
        place = (page.parent / file) if file else page
        assert place.exists(), link
        assert not anchor or anchor in anchors(place), link


def test_its_first_block_is_the_two_commands():
    block = re.search(r"(?ms)^```\w+\n(.*?)^```$", README.read_text(encoding="utf-8"))[1]
    commands = [line.partition("#")[0].strip() for line in block.splitlines()]
    assert commands == ["bash scripts/demo.sh", "bash scripts/test.sh"]


@pytest.mark.parametrize("readme", sorted(PACKAGE.rglob("README.md")), ids=lambda path: path.parent.name)
def test_a_room_lists_its_files(readme: Path):
    lines = readme.read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1] for line in lines if line.startswith("|")]
    listed = {name for row in rows for name in re.findall(r"`(\w+\.py)`", row)}
    assert listed == {path.name for path in readme.parent.glob("[!_]*.py")}


def test_the_number_of_model_types_is_that_of_the_table():
    """A type may have several rows."""
    table = (ROOT / ".github" / "ARCHITECTURES.md").read_text(encoding="utf-8")
    exact = set(re.findall(r"^\| \w+ \| ([\w-]+) \| exact \|", table, re.MULTILINE))
    assert f"over {len(exact)} model types" in README.read_text(encoding="utf-8")
