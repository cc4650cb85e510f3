"""What commands refuse: one line on stderr that names the option or the value, code 2, nothing printed or written."""

from pathlib import Path

import pytest
from command import command
from tiny import near, tiny
from tiny_tokenizer import TEXTS

from hf_specx import DraftTargetPair
from hf_specx.hub import fetch


BEFORE_LOADING = {  # what is said, with the command that says it
    "no prompts; give them as arguments": "generate",
    "more than one way": "generate a --demo",
    "--verification 'nucleus' is unknown; choose one of token, block, coupled": "generate a --verification nucleus",
    "--num-draft-tokens 'many' is not a number": "generate a --num-draft-tokens many",
    "--dtype int8 is unknown": "generate a --dtype int8",
    "--top-p 1.1 is not in (0, 1]": "generate a --top-p 1.1",
    "--out shows and times nothing": "generate a --out x --repeats 1",
    "is there already, and there is no notes.txt.arguments": "generate a --out NOTES",
    "a prompt is a list of messages; add --chat": "generate --pair no/pair --prompts MESSAGES --out x",
    "notes.jsonl, prompt 2: the line is not JSON": "generate --pair no/pair --prompts NO_JSON --out x",
    "other.jsonl, prompt 2: give a text in quotes, or an object with": "generate --pair no/pair --prompts OTHER",
    "there is no folder": "bench --out no/such/folder.json",
    "'' is neither a folder nor an id": "bench NOTHING",
    "has no results of this version": "bench --out NOTES",
    "is there already, and is nothing that would be": "check no/pair --out NOTES",
    "would be written there; name another file": "card embedded --out FOREIGN",
    "embedded.md is there already, and is nothing that": "card --out CARDS",
    "contender 'plain' is given twice": "bench --contender plain --contender block-2 --contender plain",
    "--max-new-tokens 1 leaves no round to time": "bench --max-new-tokens 1",
    "--texts-per-phase 0 is not an int of 1 or more": "distill T eagle3 --out x --texts-per-phase 0",
    "--max-new-tokens 1 leaves nothing to compare": "check --max-new-tokens 1",
    "is no interrupted check of this version": "check no/pair --out BEGUN",
    "--repeats 0 cannot tell; give one draft, or measure": "tune T --repeats 0 --out x",
    "is there already; name another folder, or pass --overwrite": "tune T D --out FULL",
    "is no pair, as it has no specx_config.json": "tune T D --out FULL --overwrite",
    "(Not a directory); name another place": "tune T D --out NOTES/pair",
    "no prompts; give them with --prompts FILE, on standard input, or use --repeats 0.": "tune T D",
    "'embedded' is a well-known pair, of which there is one card and one version; leave a/b out": "card embedded a/b",
    "did you mean 'embedded'": "card embeded",
    "give either the repository's name, or --out": "publish x/y",
    "is no name of a repository": "publish x/y a/b/c",
    "--draft exit:1 needs a target; name one": "generate a --draft exit:1",
    "cannot be used here: it is a new head, which specx distill trains": "generate a --target T --draft eagle3",
    "suffix has no weights to train; give layers:2": "distill T suffix --out x",
}
OF_MODELS = {
    "999 new ones are more than the 128 positions": "generate a --pair PAIR --max-new-tokens 999",
    "prompt 2 is empty": "generate --pair PAIR --prompts EMPTY",
    "prompt 1 is empty, or has half of a surrogate": "generate --pair PAIR HALF",
    "brings no prompts of its own": "generate --demo --pair PAIR",
    "has no tokenizer, so it cannot read text": "bench UNREAD",
    "/draft, or give the pair alone": "generate a --target MODEL --draft PAIR",
    "is a model and no pair (it has no specx_config.json); name a draft for it, as --draft": "check MODEL",
    "'org/ngram' cannot be got from the Hub, and there is no folder of that name here": "bench PAIR --draft org/ngram",
}


@pytest.fixture(scope="module")
def names(tmp_path_factory, folder) -> dict[str, str]:
    """What words in capitals mean."""
    root, target = tmp_path_factory.mktemp("refused"), tiny()
    files = {
        "NOTES": ("notes.txt", "notes"),
        "MESSAGES": ("messages.jsonl", '{"messages": [{"role": "user", "content": "a"}]}'),
        "EMPTY": ("empty.jsonl", '"a"\n""'),
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
    found = {word: str(root / name) for word, name in places.items()}
    return found | {"NOTHING": "", "HALF": "a\udcff", "PAIR": folder}


def refused(line: str, told: str, names: dict[str, str], lines: int = 1) -> str:
    """What was printed by the command, which is refused with these words in the last of some lines."""
    words = [names.get(word, word.replace("NOTES/", f"{names['NOTES']}/")) for word in line.split()]
    result = command(*words, input="")
    assert (result.exit_code, len(result.stderr.splitlines()) <= lines) == (2, True), result.output
    last = result.stderr.splitlines()[-1]
    assert (told in last, last.lower().startswith("error: ")) == (True, True), last
    assert Path(names["NOTES"]).read_text() == "notes"
    assert (Path(names["FULL"]) / "thesis.txt").exists()
    return result.stdout


@pytest.mark.parametrize("told", BEFORE_LOADING)
def test_refused_before_anything_is_loaded(names, monkeypatch, tmp_path, told: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetch, "snapshot_download", None)
    monkeypatch.setattr(DraftTargetPair, "from_pretrained", None)
    assert refused(BEFORE_LOADING[told], told, names) == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("told", OF_MODELS)
def test_refused_for_these_models(names, monkeypatch, tmp_path, told: str):
    monkeypatch.chdir(tmp_path)
    refused(OF_MODELS[told], told, names, lines=3)  # after what runs was said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("found", "says"), [(True, "schema.json is no JSON ("), (None, "pip install xgrammar")])
def test_a_schema_is_read_before_models(monkeypatch, tmp_path, found, says):
    (tmp_path / "schema.json").write_text("{")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    result = command("generate", "a", "--pair", "no/pair", "--json-schema", str(tmp_path / "schema.json"))
    assert (result.exit_code, says in result.stderr) == (2, True)


@pytest.mark.parametrize("out", ["../mine", ".", ""])
def test_a_training_does_not_go_into_a_folder_in_use(tmp_path, monkeypatch, out: str):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    monkeypatch.chdir(tmp_path / "mine")
    result = command("distill", "org/target", "layers:1", "--out", out, input="\n".join(TEXTS))
    assert (result.exit_code, "is there already" in result.stderr) == (2, True)
