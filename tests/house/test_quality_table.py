"""The table of quality: unseen prompts, the same batches and seeds, and a page that else stays as it was."""

import hashlib
import importlib
import json
import sysconfig
from pathlib import Path

import pytest
import torch
from tiny import near, tiny
from tiny_tokenizer import tiny_tokenizer

from hf_specx import DraftTargetPair
from hf_specx.bench.contenders import Contender


SCRIPTS = Path(__file__).parents[2] / "scripts"
SIZES = {"vocab_size": 280, "eos_token_id": 0, "pad_token_id": 1}
BEGIN, END = "<!-- quality_table.py begins -->", "<!-- quality_table.py ends -->"
SOURCE = '''import os
\x0c
@cache
def first(x):
    def inner():
        return x
    return inner

class Some:
    async def second(self):
        """Nothing."""

def last(): pass
'''


@pytest.fixture(scope="module")
def scripts():
    """The modules, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        names = ("train_pair", "held_out", "quality_page", "quality_table")
        yield {name: importlib.import_module(name) for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "my-pair"
    target = tiny(**SIZES)
    DraftTargetPair(target, near(target, 0.05), tiny_tokenizer()).save_pretrained(path)
    return str(path)


def library(monkeypatch, scripts, tmp_path, trained_on: str, *held_out: str):
    """A small standard library in place of the real one."""
    paths = []
    for number, text in enumerate((trained_on, *held_out)):
        paths.append(tmp_path / f"{number}.py")
        paths[-1].write_text(text)
    monkeypatch.setattr(scripts["held_out"], "source_files", lambda: (paths[:1], paths[1:]))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))


def function(name: str) -> str:
    """Of ten lines."""
    return f"def {name}(x):\n" + "".join(f"    x += {name}({i})\n" for i in range(9))


def test_prompts_are_of_files_that_training_holds_out(scripts):
    """By the hash itself, and by the split of `train_pair.py`; each goes on as the file does."""
    root, tokenizer = Path(sysconfig.get_path("stdlib")), tiny_tokenizer()
    found = scripts["held_out"].held_out_prompts(tokenizer, 40, 30, 20)
    trained_on, held_out = scripts["train_pair"].source_files()
    places = [prompt.place.rpartition(":") for prompt in found]
    assert len(set(places)) == 40
    assert {root / place[0] for place in places} <= set(held_out) - set(trained_on)
    for prompt, (name, _, line) in zip(found, places, strict=True):
        assert int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0
        text = (root / name).read_text(encoding="utf-8", errors="replace")
        start = "\n".join(text.split("\n")[int(line) - 1 :])
        assert start.startswith(prompt.text + prompt.follows)
        assert prompt.text.split("def")[0].strip() in ("", "async")
        assert (len(tokenizer(prompt.text).input_ids), len(tokenizer(prompt.follows).input_ids)) == (30, 20)


def test_files_take_turns(scripts, monkeypatch, tmp_path):
    library(monkeypatch, scripts, tmp_path, "", function("f") + function("g"), function("h"), "def short(): pass\n")
    found = scripts["held_out"].held_out_prompts(tiny_tokenizer(), 3, 10, 20)
    assert [prompt.place for prompt in found] == ["1.py:1", "2.py:1", "1.py:11"]


def test_what_was_trained_on_elsewhere_is_no_prompt(scripts, monkeypatch, tmp_path):
    library(monkeypatch, scripts, tmp_path, "x = 1\n" + function("g"), function("f") + function("g"))
    with pytest.raises(ValueError, match="only 1 held-out functions of 30 tokens were found for 2 prompts; ask for"):
        scripts["held_out"].held_out_prompts(tiny_tokenizer(), 2, 10, 20)


def test_functions_inside_of_functions_are_left_out(scripts, tmp_path):
    (tmp_path / "a.py").write_text(SOURCE)
    assert list(scripts["held_out"].functions(tmp_path / "a.py")) == [
        (4, "def first(x):\n    def inner():\n        return x\n    return inner"),
        (10, '    async def second(self):\n        """Nothing."""'),
        (13, "def last(): pass"),
    ]


def test_ways_have_the_same_batches_and_seeds(scripts, monkeypatch):
    """A batch has one seed in all ways."""
    table, taken = scripts["quality_table"], []

    def call(contender, inputs, options):
        taken.append((contender.name, options["do_sample"], inputs, options["max_new_tokens"], torch.initial_seed()))
        return torch.tensor([[9, 5, 5, 5], [9, 5, 1, 0]])

    monkeypatch.setattr(Contender, "__call__", call)
    target = tiny(eos_token_id=1)
    pair, batches = DraftTargetPair(target, near(target, 0.1)), [{"input_ids": torch.tensor([[i]])} for i in (3, 4)]
    for way in table.WAYS:
        assert table.generate_all(pair, way, batches, 40, 7) == [[5] * 3, [5, 1]] * 2
    ways = [(way.contender, way.options["do_sample"]) for way in table.WAYS]
    assert taken == [(*way, inputs, 40, 7 + i) for way in ways for i, inputs in enumerate(batches)]


def test_agreement_has_the_exact_interval(scripts):
    """All of n rows, and none: the other end is where 0.025 is the chance of that, 0.025 ** (1 / n)."""
    plain = [[1, 2]] * 20
    assert scripts["quality_table"].agreement(plain, plain) == {
        "value": 1.0,
        "interval": pytest.approx([0.025 ** (1 / 20), 1]),
    }
    other = scripts["quality_table"].agreement([[1, 3]] * 20, plain)
    assert other == {"value": 0.0, "interval": pytest.approx([0, 1 - 0.025 ** (1 / 20)])}


def made_row(way: str, contender: str, batch: int = 1) -> dict:
    quality = {
        name: {
            "prediction": value,
            "prediction_interval": [value / 2, value * 2],
            "difference": value - 0.3,
            "interval": [-0.5, 0.25],
        }
        for name, value in (("perplexity", 4.0), ("rougeL", 0.25), ("distinct_2", 0.5), ("length", 9.0))
    }
    return {
        "way": way,
        "contender": contender,
        "batch": batch,
        "quality": quality,
        "equal": {"value": 1.0, "interval": [0.962, 1.0]},
    }


def test_the_form_of_the_table(scripts):
    found = {
        "made": {"python": "3.x", "dtype": "float32", "device": "cpu (some)", "torch": "2", "transformers": "5"},
        "files": {"all": 500, "held_out": 27, "used": 20},
        "settings": {"prompts": 96, "prompt_tokens": 64, "new_tokens": 32, "temperature": 0.8, "top_p": 0.95},
        "rows": [made_row("plain, greedy", "plain"), made_row("speculative, greedy", "block-auto", 8)],
    }
    lines = scripts["quality_page"].tables(found).split("\n")
    assert lines == [
        "96 prompts, the first 64 tokens of functions in 20 of the 27 held-out files (one in 20 by a hash, of 500) of "
        "Python 3.x; at most 32 new tokens. Nucleus: T = 0.8, top-p 0.95. float32 on cpu (some), torch 2, "
        "transformers 5. In brackets 95 % intervals: bootstraps over prompts; exact ones of shares.",
        "",
        "| text | batch | perplexity | ROUGE-L | distinct-2 | equal to plain |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| plain, greedy | 1 | 4.00 [2.00, 8.00] | 0.250 [0.125, 0.500] | 0.500 [0.250, 1.000] |  |",
        "| speculative, greedy | 8 | 4.00 [2.00, 8.00] | 0.250 [0.125, 0.500] | 0.500 [0.250, 1.000] "
        "| 100% [96%, 100%] |",
        "",
        "| minus plain | batch | perplexity | ROUGE-L | distinct-2 |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| speculative, greedy | 8 | +3.70 [-0.50, +0.25] | -0.050 [-0.500, +0.250] | +0.200 [-0.500, +0.250] |",
    ]


def test_the_rest_of_a_page_stays_as_it_was(scripts):
    page = scripts["quality_page"]
    before, after = "# α\r\n\n", "\r\nrest  \n\n"
    once = page.replaced(f"{before}{BEGIN}\nold\n{END}{after}", "| new |")
    assert once == f"{before}{BEGIN}\n| new |\n{END}{after}"
    assert page.replaced(once, "| new |") == once


@pytest.mark.parametrize(
    "form", ["", "{begin}", "{end}", "{end} {begin}", "{begin} {end} {begin}", "{end} {begin} {end}"]
)
def test_a_page_without_its_markers_is_refused(scripts, tmp_path, form):
    """Before anything is loaded."""
    file = tmp_path / "page.md"
    file.write_text(form.format(begin=BEGIN, end=END))
    with pytest.raises(
        ValueError, match="the page must have one <!-- .* and after it one <!-- .*; write them into it"
    ):
        scripts["quality_table"].main(pair="no/such", readme=file, out=tmp_path / "out.json")
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


@pytest.mark.parametrize(("prompts", "batch"), [(4, [3]), (4, [1, 4]), (0, [1]), (4, [0])])
def test_prompts_that_are_no_whole_batches(scripts, tmp_path, prompts, batch):
    file = tmp_path / "page.md"
    file.write_text(f"{BEGIN}{END}")
    with pytest.raises(ValueError, match=rf"prompts={prompts} are not two or more whole batches of \d; give"):
        scripts["quality_table"].main(
            pair="no/such", readme=file, out=tmp_path / "out.json", prompts=prompts, batch=batch
        )


def test_our_page_has_its_markers(scripts):
    page = (SCRIPTS.parent / "hf_specx/equivalence/README.md").read_text(encoding="utf-8")
    assert scripts["quality_page"].replaced(page, "x") != page


def test_the_whole_of_it(scripts, folder, tmp_path):
    """Greedy and coupled text is plain text, and its quality with it; no generator has moved."""
    page, readme, out = scripts["quality_page"], tmp_path / "page.md", tmp_path / "quality.json"
    readme.write_bytes(f"before\r\n{BEGIN}{END}\r\nafter".encode())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    scripts["quality_table"].main(
        pair=folder, readme=readme, out=out, prompts=6, batch=[1, 3], prompt_tokens=16, new_tokens=8, seed=5
    )
    assert torch.equal(torch.get_rng_state(), state)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert readme.read_bytes().decode() == page.replaced(f"before\r\n{BEGIN}{END}\r\nafter", page.tables(found))
    rows = {(each["way"], each["batch"]): each for each in found["rows"]}
    assert list(rows) == [(way.name, batch) for batch in (1, 3) for way in scripts["quality_table"].WAYS]
    for (way, _), each in rows.items():
        if way != "speculative, nucleus":
            assert each["equal"]["value"] == 1
            assert [measured["difference"] for measured in each["quality"].values()] == [0] * len(each["quality"])
    assert rows["speculative, nucleus", 3]["equal"]["value"] < 1
    assert found["files"]["used"] == len({place.rpartition(":")[0] for place in found["prompts"]}) == 6
