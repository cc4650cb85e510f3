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
    """The only line on standard output."""
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1), result.output
    return json.loads(result.stdout)


def reference(pair, prompts, **options):
    """The texts that stock `generate` gives."""
    inputs = encode(pair.tokenizer, pair.target, prompts, 12)
    torch.manual_seed(3)
    output = pair.target.generate(**inputs, max_new_tokens=12, **options)
    return pair.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_what_the_demo_says(pair):
    """What it will do, a text, that a seed gives one text, all ways side by side, and a closing summary."""
    result = specx("--demo", "--max-new-tokens", "6", "--repeats", "1")
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
    runs = document(specx("--demo", "--max-new-tokens", "4", "--repeats", "1", "--json"))["runs"]
    assert [set(run["comparison"]) & {"plain", "stock", "ours"} for run in runs] == [
        {"plain", "stock", "ours"},
        {"plain", "ours"},
    ]


def test_coupled_is_stock_sampling(pair):
    options = ["--verification", "coupled", "--temperature", "0.8", "--top-k", "20", "--top-p", "0.9"]
    run = document(specx(*PROMPTS, *FAST, *options, "--num-draft-tokens", "3", "--json"))["runs"][0]
    assert run["texts"] == reference(pair, PROMPTS, do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    assert (run["report"]["verification"], run["report"]["num_draft_tokens"]) == ("coupled", 3)


@pytest.mark.usefixtures("draft_pays")
def test_text_of_an_encoder_decoder(tokenizer, monkeypatch):
    """All that its decoder wrote, though the prompts are longer than the one token that it starts from."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 280, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1}
    target = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=1, eos_token_id=0)).eval()
    pair = DraftTargetPair(target, near(target, 0.1), tokenizer)
    monkeypatch.setattr(DraftTargetPair, "from_pretrained", lambda name, **options: pair)
    prompts = [f"{text} on the mat" for text in TEXTS]
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
