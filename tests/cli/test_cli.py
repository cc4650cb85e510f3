"""`specx generate`: where prompts come from, what is shown and in which colours, and how errors look."""

import json

import pytest
import torch
from command import command
from rich.text import Text
from tiny import tiny
from tiny_tokenizer import TEXTS
from zoo import build

from hf_specx import DraftTargetPair
from hf_specx.bench.inputs import encode
from hf_specx.cli import loading
from hf_specx.cli.coloured import written_out
from hf_specx.cli.options import Loading


PROMPTS = list(TEXTS)
FAST = ["--max-new-tokens", "12", "--seed", "3"]


def specx(*arguments: str, colour: bool = False):
    return command("generate", *arguments, **({"FORCE_COLOR": "1", "TERM": "xterm-256color"} if colour else {}))


def document(result):
    """The only line on standard output."""
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1), result.output
    return json.loads(result.stdout)


def reference(pair: DraftTargetPair, prompts, **options):
    """The texts that stock `generate` gives."""
    inputs = encode(pair.tokenizer, pair.target, prompts, 12)
    torch.manual_seed(3)
    output = pair.target.generate(**inputs, max_new_tokens=12, **options)
    read = 1 if pair.target.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return pair.tokenizer.batch_decode(output[:, read:], skip_special_tokens=True)


def test_what_the_demo_says(pair):
    """A text, that a seed gives one text, and all ways side by side."""
    result = specx("--demo", "--max-new-tokens", "6", "--repeats", "1")
    assert result.exit_code == 0, result.stderr
    assert written_out(PROMPTS[1]) in result.stdout  # the one that reads best
    assert "plain generate gave the same text, token by token." in result.stdout
    ways = [line for line in result.stdout.splitlines() if "tokens/s" in line]
    assert [line.count("tokens/s") for line in ways] == [2, 1, 2]  # plain, transformers' own, ours
    runs = document(specx("--demo", "--max-new-tokens", "4", "--repeats", "1", "--json"))["runs"]
    ways = {"plain", "stock", "ours"}
    assert [set(run["comparison"]) & ways for run in runs] == [ways, {"plain", "ours"}]


def test_coupled_is_stock_sampling(pair):
    options = ["--verification", "coupled", "--temperature", "0.8", "--top-k", "20", "--top-p", "0.9"]
    run = document(specx(*PROMPTS, *FAST, *options, "--num-draft-tokens", "3", "--json"))["runs"][0]
    assert run["texts"] == reference(pair, PROMPTS, do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    assert (run["report"]["verification"], run["report"]["num_draft_tokens"]) == ("coupled", 3)


def test_text_of_an_encoder_decoder(loaded):
    """All that its decoder wrote, though the prompts are longer than the one token that it starts from."""
    target = build("seq2seq", "t5")
    target.resize_token_embeddings(280)
    pair, _ = loaded(target)
    run = document(specx(*PROMPTS, *FAST, "--greedy", "--json"))["runs"][0]
    assert run["texts"] == reference(pair, PROMPTS, do_sample=False)
    assert all(run["texts"])


def test_loading_is_told_what_was_given_and_where_there_is_an_accelerator(loaded, monkeypatch):
    _, seen = loaded(tiny(vocab_size=280))
    assert specx("the cat", *FAST).exit_code == 0
    assert specx("the cat", *FAST, "--revision", "v1", "--token", "t", "--trust-remote-code").exit_code == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    loading.load_given_pair("embedded", Loading())
    given = {"dtype": "auto", "revision": "v1", "token": "t", "trust_remote_code": True}
    assert seen == [{"dtype": "auto"}, given, {"dtype": "auto", "device_map": "auto"}]


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
    assert (result.exit_code, "is no JSON schema that" in result.stderr) == (2, True)


@pytest.mark.parametrize("prompts", [PROMPTS[1:2], PROMPTS])
@pytest.mark.usefixtures("draft_pays")
def test_text_is_shown_literally(pair, prompts):
    """In the colours of its origins, where there are colours."""
    result = specx(*prompts, *FAST, "--greedy")
    assert "a dog [bold]sat[/bold] on" in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stderr == ""
    for text in reference(pair, prompts, do_sample=False):
        assert Text(written_out(text)).plain in result.stdout
    _, _, below_the_legend = specx(*prompts, *FAST, colour=True).stdout.partition("\n")
    assert "\x1b[32m" in below_the_legend
    assert pair.strategy.streamer is None
