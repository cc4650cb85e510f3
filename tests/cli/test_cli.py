"""`specx generate`: where prompts come from, what is shown and in which colours, and how errors look."""

import json

import pytest
import torch
from command import command
from rich.text import Text
from tiny import near, tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer
from transformers import T5Config, T5ForConditionalGeneration

from hf_specx import DraftTargetPair
from hf_specx.bench.inputs import encode
from hf_specx.cli import coloured, loading
from hf_specx.cli.coloured import written_out
from hf_specx.cli.options import Loading
from hf_specx.hub import fetch
from hf_specx.hub.pair_config import ModelSource, PairConfig


PROMPTS = list(TEXTS)
FAST = ["--max-new-tokens", "12", "--seed", "3"]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def models_of_pair(tokenizer):
    target = tiny(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return target, near(target, 0.1)


@pytest.fixture
def loaded(models_of_pair, tokenizer, monkeypatch):
    """A fresh pair that every id loads, and the arguments by which it was."""
    config = PairConfig(ModelSource(), ModelSource(subfolder="draft"), prompts=list(PROMPTS))
    fresh, seen = DraftTargetPair(*models_of_pair, tokenizer, config), []
    monkeypatch.setattr(DraftTargetPair, "from_pretrained", lambda name, **options: seen.append(options) or fresh)
    return fresh, seen


@pytest.fixture
def pair(loaded):
    return loaded[0]


def specx(*arguments: str, input: str | None = None, colour: bool = False):
    env = {"FORCE_COLOR": "1", "TERM": "xterm-256color"} if colour else {}
    return command("generate", *arguments, input=input, **env)


def document(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def reference(pair, prompts, **options):
    """The texts that stock `generate` gives."""
    inputs = encode(pair.tokenizer, pair.target, prompts, 12)
    torch.manual_seed(3)
    output = pair.target.generate(**inputs, max_new_tokens=12, **options)
    return pair.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("source", ["arguments", "file", "stdin"])
def test_prompts_from_everywhere(pair, tmp_path, source):
    (tmp_path / "prompts.txt").write_text("\n\n".join(PROMPTS) + "\n")
    arguments = {"arguments": PROMPTS, "file": ["--file", str(tmp_path / "prompts.txt")], "stdin": []}[source]
    result = specx(*arguments, *FAST, "--greedy", "--json", input="\n".join(PROMPTS))
    (run,) = document(result)["runs"]
    assert run["prompts"] == PROMPTS
    assert run["texts"] == reference(pair, PROMPTS, do_sample=False)
    assert run["report"]["rounds"] > 0


def test_demo_runs_at_batch_1_and_8(pair):
    runs = document(specx("--demo", "--pair", "org/pair", *FAST, "--json"))["runs"]
    assert [run["batch"] for run in runs] == [1, 8]
    assert runs[1]["prompts"] == (PROMPTS * 3)[:8]


def test_what_the_demo_says(pair):
    """What it will do, a text, that a seed gives one text, all ways side by side, and a closing summary."""
    result = specx("--demo", "--max-new-tokens", "6")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Speculative sampling with the pair embedded: about two minutes on two cores.")
    assert written_out(PROMPTS[1]) in result.stdout  # the one that reads best
    told = 'From seed 0, verification="coupled" and plain generate gave the same text, token by token.'
    assert told in lines
    ways = [line for line in lines if "tokens/s" in line]
    assert [line.count("tokens/s") for line in ways] == [2, 1, 2]  # plain, transformers' own, ours
    assert "does not take it" in ways[1]
    assert " times at batch 8 as fast as plain generate" in lines[-2]


def test_coupled_is_stock_sampling(pair):
    options = ["--verification", "coupled", "--temperature", "0.8", "--top-k", "20", "--top-p", "0.9"]
    run = document(specx(*PROMPTS, *FAST, *options, "--num-draft-tokens", "3", "--json"))["runs"][0]
    assert run["texts"] == reference(pair, PROMPTS, do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    assert (run["report"]["verification"], run["report"]["num_draft_tokens"]) == ("coupled", 3)


def test_comparison(pair):
    found = document(specx("the cat", "--max-new-tokens", "6", "--compare", "--repeats", "3", "--json"))
    comparison = found["runs"][0]["comparison"]
    speeds = {}
    for side in ("plain", "ours"):
        speeds[side] = [n / s for n, s in zip(comparison[side]["tokens"], comparison[side]["seconds"], strict=True)]
        assert comparison[side]["tokens_per_second"] == sorted(speeds[side])[1]
    ratio = sorted(ours / plain for ours, plain in zip(speeds["ours"], speeds["plain"], strict=True))[1]
    assert comparison["measured_speedup"] == ratio  # of the same turn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompts; give them as arguments"),
        (["a", "--demo"], "more than one way"),
        (["a", "--verification", "nucleus"], "verification='nucleus' is unknown; choose one of token, block, coupled"),
        (["a", "--num-draft-tokens", "-2"], "num_draft_tokens=-2 is below 1"),
        (["a", "--num-draft-tokens", "many"], "num_draft_tokens='many' is not a number"),
        (["a", "--repeats", "5"], "--repeats is for --compare"),
        (["a", "--compare", "--repeats", "4"], "--repeats 4 has no middle run"),
        (["a", "--dtype", "int8"], "--dtype int8 is unknown"),
        (["a", "--temperature", "nan"], "--temperature nan is not above 0"),
        (["a", "--top-p", "1.1"], "--top-p 1.1 is not in (0, 1]"),
        (["a", "--top-k", "-1"], "--top-k -1 is negative"),
        (["a", "--greedy", "--top-k", "5"], "--greedy does not sample"),
        (["a", "--max-new-tokens", "0"], "--max-new-tokens 0 generates nothing"),
    ],
)
def test_errors_are_one_line_and_nothing_is_loaded(loaded, arguments, message):
    result = specx(*arguments, input="")
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert loaded[1] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--max-new-tokens", "999"], "999 new ones are more than the 128 positions"),
        (["a", ""], "prompt 2 is empty"),
    ],
)
def test_prompts_that_the_model_cannot_take(pair, arguments, message):
    result = specx(*arguments)
    assert (result.exit_code, message in result.stderr) == (2, True)


@pytest.mark.usefixtures("draft_pays")
@pytest.mark.parametrize("rows", [1, 3])
def test_text_of_an_encoder_decoder(tokenizer, monkeypatch, rows):
    """All that its decoder wrote, though the prompts are longer than the one token that it starts from."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 280, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1}
    target = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=1, eos_token_id=0)).eval()
    pair = DraftTargetPair(target, near(target, 0.1), tokenizer)
    monkeypatch.setattr(DraftTargetPair, "from_pretrained", lambda name, **options: pair)
    prompts = [f"{text} on the mat" for text in TEXTS[:rows]]
    run = document(specx(*prompts, *FAST, "--greedy", "--json"))["runs"][0]
    inputs = encode(tokenizer, target, prompts, 12)
    output = target.generate(**inputs, max_new_tokens=12, do_sample=False)[:, 1:]
    assert run["texts"] == tokenizer.batch_decode(output, skip_special_tokens=True)
    assert "wwwwwwwwwwww" in run["texts"]


def test_loading_is_told_what_was_given_and_where_there_is_an_accelerator(loaded, monkeypatch):
    assert specx("the cat", *FAST).exit_code == 0
    assert specx("the cat", *FAST, "--revision", "v1", "--token", "t", "--trust-remote-code").exit_code == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    loading.load_given_pair("embedded", Loading())
    given = {"dtype": "auto", "revision": "v1", "token": "t", "trust_remote_code": True}
    assert loaded[1] == [{"dtype": "auto"}, given, {"dtype": "auto", "device_map": "auto"}]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("embeded", "did you mean 'embedded'"),
        ("gpt2-xl-with-gpt2", "make one with specx tune openai-community/gpt2-xl openai-community/gpt2 --out FOLDER"),
    ],
)
def test_names_without_an_owner_are_not_looked_for(monkeypatch, name, says):
    monkeypatch.setattr(fetch, "snapshot_download", None)
    assert says in specx("a", "--pair", name).stderr


def test_demo_without_prompts(pair):
    pair.config.prompts = []
    result = specx("--demo")
    assert result.exit_code == 2
    assert "has no prompts of its own" in result.stderr


def test_json_schema(tmp_path):
    """By the embedded pair; plain `generate` gets a new processor in each of its turns. The file begins with a BOM."""
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"kind": {"const": "measurement"}}, "required": ["kind"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema), encoding="utf-8-sig")
    arguments = ("Tom said", "--greedy", "--max-new-tokens", "24", "--json")
    result = specx(*arguments, "--json-schema", str(tmp_path / "schema.json"), "--compare", "--repeats", "1")
    run = document(result)["runs"][0]
    assert json.loads(run["texts"][0]) == {"kind": "measurement"}
    assert run["report"]["forced"] > 0
    (tmp_path / "schema.json").write_text('{"type": "nothing"}')
    result = specx(*arguments, "--json-schema", str(tmp_path / "schema.json"))
    assert result.exit_code == 2
    assert "is no JSON schema that xgrammar can read" in result.stderr


@pytest.mark.parametrize(("found", "says"), [(True, "schema.json is no JSON ("), (None, "pip install xgrammar")])
def test_a_schema_is_read_before_models(monkeypatch, tmp_path, found, says):
    (tmp_path / "schema.json").write_text("{")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    result = specx("a", "--pair", "no/pair", "--json-schema", str(tmp_path / "schema.json"))
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize("prompts", [PROMPTS[1:2], PROMPTS])
def test_text_is_shown_literally(pair, prompts):
    result = specx(*prompts, *FAST, "--greedy")
    assert "a dog [bold]sat[/bold] on" in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stderr == ""
    for text in reference(pair, prompts, do_sample=False):
        assert Text(coloured.written_out(text)).plain in result.stdout


@pytest.mark.usefixtures("draft_pays")
def test_stream_has_the_colours_of_the_report(pair, monkeypatch):
    shown = []
    plain_coloured = coloured.coloured
    monkeypatch.setattr(coloured, "coloured", lambda *a, **k: shown.append(plain_coloured(*a, **k)) or shown[-1])
    result = specx("the cat", *FAST, colour=True)
    report = pair.strategy.report
    assert len(shown) == len(report.history[0]) > 3
    for text, record in zip(shown, report.history[0], strict=True):
        assert {span.style for span in text.spans} <= {coloured.STYLES[o] for o in coloured.round_origins(record)}
    assert "\x1b[32m" in result.stdout
    assert pair.strategy.streamer is None


@pytest.mark.parametrize("name", ["generate", "check", "bench"])
def test_messages_without_a_template_are_refused_before_models(name: str, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    pair = ["--pair", "no/pair"] if name == "generate" else ["no/pair"]
    result = command(name, *pair, "--file", tmp_path / "prompts.jsonl")
    assert result.exit_code == 2
    assert "a prompt is a list of messages; add --chat" in " ".join(result.stderr.split())
