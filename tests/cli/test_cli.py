"""`specx generate`: where prompts come from, what is shown and in which colours, and how errors look."""

import json
import re

import pytest
import torch
from command import command
from tiny_tokenizer import TEXTS
from zoo import build

from hf_specx import DraftTargetPair
from hf_specx.bench.inputs import encode
from hf_specx.cli.coloured import written_out


PROMPTS = list(TEXTS)
FAST = ["--max-new-tokens", "12", "--seed", "3"]


def specx(*arguments: str, colour: bool = False):
    return command("generate", *arguments, **({"FORCE_COLOR": "1", "TERM": "xterm-256color"} if colour else {}))


def document(result):
    """The only line on standard output."""
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1), result.output
    return json.loads(result.stdout)


def reference(pair: DraftTargetPair, prompts, **options):
    """The texts that plain `generate` gives."""
    inputs = encode(pair.tokenizer, pair.target, prompts, 12)
    torch.manual_seed(3)
    output = pair.target.generate(**inputs, max_new_tokens=12, **options)
    prompt_width = 1 if pair.target.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return pair.tokenizer.batch_decode(output[:, prompt_width:], skip_special_tokens=True)


def table_rows(stderr: str) -> list[tuple[str, str]]:
    """The label and the batch size of each row of the demo's table."""
    return re.findall("^((?:plain|assisted|speculative) .*?)  +([18]) ", stderr, re.MULTILINE)


def test_what_the_demo_says(pair):
    """A text, that a seed gives one text, and all methods side by side, each with its measured speed-up and limits."""
    result = specx("--demo", "--max-new-tokens", "6", "--repeats", "1")
    assert result.exit_code == 0, result.stderr
    assert written_out(PROMPTS[1]) in result.stderr  # the one that reads best
    assert "plain generate gave the same text, token by token." in result.stderr
    assisted, ours = (f"{method} with a model of 0.0M" for method in ("assisted generation", "speculative sampling"))
    labels = "plain generate", assisted, ours
    assert table_rows(result.stderr) == [(label, size) for size in ("1", "8") for label in labels]
    assert result.stderr.count("does not take it") == 1  # transformers' own takes one row alone
    for heading in ("speed-up", "limit", "Theorem 3.8"):
        assert f"{heading}: " in result.stderr
    runs = document(specx("--demo", "--max-new-tokens", "4", "--repeats", "1", "--json"))["runs"]
    timed = {"plain", "assisted", "ours"}
    assert [set(run["comparison"]) & timed for run in runs] == [timed, {"plain", "ours"}]


def test_the_demo_compares_like_with_like(monkeypatch):
    """The head in the package is a row of its own: assisted generation takes a model, which ours takes as well."""
    monkeypatch.setattr("hf_specx.cli.session.DEMO_BATCHES", (1,))
    result = specx("--demo", "--max-new-tokens", "4", "--repeats", "1")
    assert result.exit_code == 0, result.stderr
    assert [label for label, size in table_rows(result.stderr) if size == "1"] == [
        "plain generate",
        "assisted generation with a model of 2.7M",
        "speculative sampling with a model of 2.7M",
        "speculative sampling with a head of 2.2M",
    ]
    assert "Here speculative sampling with a head of 2.2M was " in result.stderr


def test_coupled_is_plain_sampling(pair):
    options = ["--verification", "coupled", "--temperature", "0.8", "--top-k", "20", "--top-p", "0.9"]
    run = document(specx(*PROMPTS, *FAST, *options, "--num-draft-tokens", "3", "--json"))["runs"][0]
    assert run["texts"] == reference(pair, PROMPTS, do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    assert (run["report"]["verification"], run["report"]["num_draft_tokens"]) == ("coupled", 3)


def test_text_of_an_encoder_decoder(loaded):
    """All that its decoder wrote, though the prompts are longer than the one token that it starts from."""
    target = build("seq2seq", "t5")
    target.resize_token_embeddings(280)
    pair = loaded(target)
    run = document(specx(*PROMPTS, *FAST, "--no-do-sample", "--json"))["runs"][0]
    assert run["texts"] == reference(pair, PROMPTS, do_sample=False)
    assert all(run["texts"])


def test_json_schema(tmp_path):
    """By the embedded pair; plain `generate` gets a new processor in each of its turns. The file begins with a BOM."""
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"kind": {"const": "measurement"}}, "required": ["kind"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema), encoding="utf-8-sig")
    arguments = ("Tom said", "--no-do-sample", "--max-new-tokens", "24", "--json")
    result = specx(*arguments, "--json-schema", str(tmp_path / "schema.json"), "--repeats", "1")
    run = document(result)["runs"][0]
    assert json.loads(run["texts"][0]) == {"kind": "measurement"}
    assert run["report"]["forced"] > 0
    (tmp_path / "schema.json").write_text('{"type": "nothing"}')
    result = specx(*arguments, "--json-schema", str(tmp_path / "schema.json"))
    assert (result.exit_code, "JSON schema" in result.stderr) == (2, True)


@pytest.mark.parametrize("prompts", [PROMPTS[1:2], PROMPTS])
@pytest.mark.usefixtures("draft_pays")
def test_text_is_shown_literally(pair, prompts):
    """Alone on standard output; where there are colours in those of its origins, with what they mean."""
    result = specx(*prompts, *FAST, "--no-do-sample")
    assert "a dog [bold]sat[/bold] on" in result.stderr
    assert "\x1b" not in result.output
    assert "accepted: a candidate" not in result.output
    texts = reference(pair, prompts, do_sample=False)
    assert result.stdout == "".join(f"{written_out(text)}\n" for text in texts)
    result = specx(*prompts, *FAST, colour=True)
    assert "\x1b[32m" in result.stdout
    assert "a candidate that was kept" in result.stderr
    assert pair.strategy.streamer is None


def test_settings_come_from_the_generation_config_unless_they_are_typed(pair):
    """And said in one line, with both models; a temperature says that it samples."""
    config = pair.target.generation_config
    config.do_sample, config.temperature, config.top_k, config.max_new_tokens = True, 0.1, 1, 5
    for typed, expected in (
        ([], {"do_sample": True, "temperature": 0.1, "top_k": 1, "max_new_tokens": 5}),
        (["--top-k", 7, "--max-new-tokens", 6], {"do_sample": True, "top_k": 7, "max_new_tokens": 6}),
        (["--no-do-sample"], {"do_sample": False, "max_new_tokens": 5}),
    ):
        result = specx(*map(str, ("the cat", "--json", *typed)))
        assert expected.items() <= document(result)["options"].items()
        (line,) = result.stderr.splitlines()
        assert line.startswith("target LlamaForCausalLM, draft LlamaForCausalLM: do_sample=")
        assert all(f"{name}={value}" in line for name, value in expected.items())
    config.do_sample = config.temperature = config.top_k = config.max_new_tokens = None
    assert document(specx("the cat", *FAST, "--json"))["options"] == {"do_sample": False, "max_new_tokens": 12}
    options = document(specx("the cat", *FAST, "--temperature", "0.5", "--json"))["options"]
    assert options == {"do_sample": True, "max_new_tokens": 12, "temperature": 0.5, "top_p": 1.0, "top_k": 50}
