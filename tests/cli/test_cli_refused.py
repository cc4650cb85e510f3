"""What commands refuse: one line on stderr that names the option or the value, code 2, nothing printed or written."""

from pathlib import Path

import pytest
from command import command
from tiny import near, tiny
from tiny_tokenizer import TEXTS

from hf_specx import DraftTargetPair
from hf_specx.hub import fetch
from hf_specx.hub.known_pairs import BY_NAME


KNOWN = next(iter(BY_NAME))
NO_PROMPTS = "no prompts; give them with --file, on standard input, or use --no-measure."
BEFORE_LOADING = {  # what is said, with the command that says it
    "no prompts; give them as arguments": "generate",
    "more than one way": "generate a --demo",
    "verification='nucleus' is unknown; choose one of token, block, coupled": "generate a --verification nucleus",
    "num_draft_tokens='many' is not a number": "generate a --num-draft-tokens many",
    "--dtype int8 is unknown": "generate a --dtype int8",
    "--top-p 1.1 is not in (0, 1]": "generate a --top-p 1.1",
    "make one with specx tune openai-community/gpt2-xl": "generate a --pair gpt2-xl-with-gpt2",
    "--out shows and times nothing": "generate a --out x --compare",
    "is there already, and there is no notes.txt.arguments": "generate a --out NOTES",
    "a prompt is a list of messages; add --chat": "generate --pair no/pair --file MESSAGES",
    "there is no folder": "bench --out no/such/folder.json",
    "has no results of this version": "bench --out NOTES",
    "new_tokens=1 and samples=None leave nothing to compare": "check --new-tokens 1",
    "is no interrupted check of this version": "check no/pair --resume NOTES",
    "--no-measure cannot tell; give one draft, or measure": "tune T --no-measure --out x",
    "is there already; name another folder, or pass --overwrite": "tune T D --out FULL",
    "is no pair, as it has no specx_config.json": "tune T D --out FULL --overwrite",
    "(Not a directory); name another place": "tune T D --out NOTES/pair",
    NO_PROMPTS: "tune T D",
    "specx tune takes texts": "tune T D --file MESSAGES",
    "without a name there is no card": "card --title a/b",
    f"--title a/b is for pairs of your own, and '{KNOWN}'": f"card {KNOWN} --title a/b",
    f"did you mean '{KNOWN}'": f"card {KNOWN[:-1]}",
    "--revision v1 is for pairs of your own, and 'embedded'": "export vllm embedded --revision v1",
    "give the repository's name, or --folder": "publish x/y",
    "is no name of a repository": "publish x/y a/b/c",
    "is no pair, as it has no specx_config.json, so": "publish x/y --folder FULL --overwrite",
    "--draft ngram is no kind of draft to save; choose suffix, exit:4 or the like.": "publish x/y a/b --draft ngram",
}
OF_MODELS = {
    "999 new ones are more than the 128 positions": "generate a --pair PAIR --max-new-tokens 999",
    "prompt 2 is empty": "generate --pair PAIR --file EMPTY",
    "has no prompts of its own": "generate --demo --pair PAIR",
    "has no tokenizer, so it cannot read text": "bench UNREAD",
    "give a list of texts; the pair has none of its own": "check PAIR",
    "revision='v1' is for repositories on the Hub": "tune PAIR D --file NOTES --revision v1",
}


@pytest.fixture(scope="module")
def names(tmp_path_factory, folder) -> dict[str, str]:
    """What words in capitals mean."""
    root, target = tmp_path_factory.mktemp("refused"), tiny()
    files = {
        "notes.txt": "notes",
        "messages.jsonl": '{"messages": [{"role": "user", "content": "a"}]}',
        "empty.jsonl": '"a"\n""',
        "full/thesis.txt": "years of it",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    DraftTargetPair(target, near(target, 0.1)).save_pretrained(root / "unread")
    places = {"NOTES": "notes.txt", "MESSAGES": "messages.jsonl", "EMPTY": "empty.jsonl", "FULL": "full"}
    places |= {"UNREAD": "unread"}
    return {"PAIR": folder} | {word: str(root / name) for word, name in places.items()}


def refused(line: str, told: str, names: dict[str, str]) -> str:
    """What was printed by the command, which is refused with these words."""
    words = [names.get(word, word.replace("NOTES/", f"{names['NOTES']}/")) for word in line.split()]
    result = command(*words, input="")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
    assert told.removesuffix(", ") in result.stderr
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
    refused(OF_MODELS[told], told, names)
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


def test_a_draft_that_is_not_there_is_named():
    result = command("generate", "a", "--draft", "org/ngram")
    assert result.exit_code == 2
    assert "'org/ngram' cannot be got from the Hub, and there is no folder of that name here" in result.stderr
