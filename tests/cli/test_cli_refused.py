"""What commands refuse: one line on stderr that names the option or the value, code 2, nothing printed or written."""

from pathlib import Path

import pytest
from command import command
from tiny import near, tiny
from tiny_tokenizer import TEXTS

from hf_specx import DraftTargetPair
from hf_specx.hub import fetch


BEFORE_LOADING = {  # commands, each with a word of what it is told
    "generate": "--prompts",
    "generate a --demo": "more than one way",
    "generate a --verification nucleus": "nucleus",
    "generate a --dtype int8": "int8",
    "generate a --top-p 1.1": "--top-p",
    "generate a --out x --repeats 1": "--repeats",
    "generate a --out NOTES": "notes.txt.arguments",
    "generate --pair no/pair --prompts MESSAGES --out x": "--chat",
    "generate --pair no/pair --prompts NO_JSON --out x": "prompt 2",
    "generate --pair no/pair --prompts OTHER": "prompt 2",
    "generate a --chat-template-kwargs {}": "--chat",
    "generate a --chat --chat-template-kwargs yes": "no JSON",
    "generate a --draft exit:1": "target",
    "generate a --target T --draft eagle3": "specx distill",
    "bench --out no/such/folder.json": "folder",
    "bench NOTHING": "id",
    "bench --out NOTES": "results",
    "bench --method plain --method block-2 --method plain": "twice",
    "bench --max-new-tokens 1": "--max-new-tokens",
    "check no/pair --out NOTES": "there already",
    "check no/pair --out BEGUN": "interrupted check",
    "generate a --split test": "--dataset",
    "generate a --min-p 0.1 --no-do-sample": "--min-p",
    "generate embedded": "did you mean --pair embedded?",
    "generate FULL": "did you mean --pair",
    "distill T eagle3 --out x --quantize 4bit": "--quantize",
    "tune T suffix --out x --quantize 4bit": "--quantize",
    "generate a --quantize 3bit": "4bit",
    "card embedded --out FOREIGN": "another file",
    "card --out CARDS": "name the pair",
    "card embedded a/b": "a/b",
    "card embeded": "did you mean",
    "publish x/y": "--out",
    "publish x/y a/b/c": "a/b/c",
    "publish": "--code",
    "publish --code": "--code --out",
    "publish --code x/y --out z": "either",
    "publish --code x/y --inside": "--inside",
    "publish --code --out FULL": "there already",
    "publish --code --code-only x/y": "--code-only",
    "publish --code-only": "--code-only org/name",
    "publish --code-only FULL": "no code",
    "distill T eagle3 --out x --texts-per-phase 0": "--texts-per-phase",
    "distill T suffix --out x": "suffix",
    "tune T --repeats 0 --out x": "--repeats 0",
    "tune T D --out FULL": "--overwrite",
    "tune T D --out FULL --overwrite": "specx_config.json",
}
OF_MODELS = {
    "generate a --pair PAIR --max-new-tokens 999": "128 positions",
    "generate --pair PAIR HALF": "prompt 1",
    "generate --demo --pair PAIR": "--prompts",
    "bench UNREAD": "tokenizer",
    "generate a --target MODEL --draft PAIR": "/draft",
    "generate a --target MODEL --draft embedded": "is a pair, and no draft",
    "check MODEL": "--draft",
    "bench PAIR --draft org/ngram": "Hub",
}


@pytest.fixture(scope="module")
def names(tmp_path_factory, folder) -> dict[str, str]:
    """What words in capitals mean."""
    root, target = tmp_path_factory.mktemp("refused"), tiny()
    files = {
        "NOTES": ("notes.txt", "notes"),
        "MESSAGES": ("messages.jsonl", '{"messages": [{"role": "user", "content": "a"}]}'),
        "NO_JSON": ("notes.jsonl", '"a"\nnotes'),
        "OTHER": ("other.jsonl", '{"prompt": "a"}\n{"other": "a"}'),
        "THESIS": ("full/thesis.txt", "years of it"),
        "FOREIGN": ("foreign.md", "---\nlibrary_name: transformers\n---\nyears of it"),
        "OF_ANOTHER": ("cards/embedded.md", "years of it"),
        "UNFINISHED": ("begun.json.unfinished", "notes"),
    }
    (root / "full").mkdir()
    (root / "cards").mkdir()
    for name, text in files.values():
        (root / name).write_text(text)
    DraftTargetPair(target, near(target, 0.1)).save_pretrained(root / "unread")
    target.save_pretrained(root / "model")
    places = {word: name for word, (name, _) in files.items()}
    places |= {"FULL": "full", "UNREAD": "unread", "BEGUN": "begun.json", "MODEL": "model", "CARDS": "cards"}
    paths = {word: str(root / name) for word, name in places.items()}
    return paths | {"NOTHING": "", "HALF": "a\udcff", "PAIR": folder}


def refused(line: str, word: str, names: dict[str, str], lines: int = 1) -> str:
    """What was printed by the command, which is refused with this word in the last of some lines."""
    words = [names.get(part, part) for part in line.split()]
    result = command(*words, input="")
    assert result.exit_code == 2, result.output
    errors = result.stderr.splitlines()
    assert len(errors) <= lines, result.stderr
    assert errors[-1].lower().startswith("error: ")
    assert word in errors[-1]
    assert Path(names["NOTES"]).read_text() == "notes"
    assert (Path(names["FULL"]) / "thesis.txt").exists()
    return result.stdout


@pytest.mark.parametrize("line", BEFORE_LOADING)
def test_refused_before_anything_is_loaded(names, monkeypatch, tmp_path, line: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetch, "snapshot_download", None)
    monkeypatch.setattr(DraftTargetPair, "from_pretrained", None)
    monkeypatch.setattr("hf_specx.cli.options.find_spec", lambda name: True)  # as if packages of few bits were there
    assert refused(line, BEFORE_LOADING[line], names) == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", OF_MODELS)
def test_refused_for_these_models(names, monkeypatch, tmp_path, line: str):
    monkeypatch.chdir(tmp_path)
    refused(line, OF_MODELS[line], names, lines=3)  # after what runs was said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("spec", "word"), [(True, "JSON"), (None, "xgrammar")])
def test_a_schema_is_read_before_models(monkeypatch, tmp_path, spec, word):
    (tmp_path / "schema.json").write_text("{")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    result = command("generate", "a", "--pair", "no/pair", "--json-schema", str(tmp_path / "schema.json"))
    assert (result.exit_code, word in result.stderr) == (2, True)


@pytest.mark.parametrize("out", ["../mine", ".", ""])
def test_a_training_does_not_go_into_a_folder_in_use(tmp_path, monkeypatch, out: str):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    monkeypatch.chdir(tmp_path / "mine")
    result = command("distill", "org/target", "layers:1", "--out", out, input="\n".join(TEXTS))
    assert (result.exit_code, "is there already" in result.stderr) == (2, True)
