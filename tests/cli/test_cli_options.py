"""Options that people look for: they reach what they are for, and a mistake is told in one line."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command import command
from tiny import near, tiny
from tiny_tokenizer import SIZES, TEXTS, saved, tiny_tokenizer

from hf_specx import DraftTargetPair
from hf_specx.bench.inputs import emitted
from hf_specx.cli.session import Session


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_processors_and_stops_reach_the_text(pair: DraftTargetPair, tmp_path: Path):
    """In a file and on the terminal; a text ends at its stop string, and is not filled up behind it."""
    how = {"do_sample": True, "temperature": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "max_new_tokens": 24}
    expected = pair.complete(list(TEXTS), seed=3, top_k=0, stop_strings=["e"], **how)
    assert expected != pair.complete(list(TEXTS), seed=3, top_k=0, stop_strings=["e"], **how | {"min_p": 0.2})
    typed = "--temperature 0.9 --min-p 0.01 --repetition-penalty 1.2 --top-k 0 --stop e --seed 3 --max-new-tokens 24"
    out = tmp_path / "done.jsonl"
    result = command("generate", *TEXTS, *typed.split(), "--out", out)
    assert result.exit_code == 0, result.stderr
    assert [line["text"] for line in lines_of(out)] == expected
    document = json.loads(command("generate", *TEXTS, *typed.split(), "--json", "--repeats", 1).stdout)
    (run,) = document["runs"]
    assert {"min_p": 0.01, "repetition_penalty": 1.2}.items() <= document["options"].items()
    assert all(text.find("e") in (-1, len(text) - 1) for text in run["texts"])
    assert run["report"]["emitted"] == sum(run["report"]["emitted_per_row"]) > 0
    assert run["comparison"]["ours"]["tokens"] == [run["report"]["emitted"]]


def test_what_a_stop_string_ended_has_no_pads():
    target = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        generation_config=SimpleNamespace(eos_token_id=0, pad_token_id=1),
    )
    inputs, output = {"input_ids": torch.tensor([[5], [5]])}, torch.tensor([[5, 7, 1, 8, 1, 1], [5, 1, 9, 0, 1, 1]])
    assert emitted(target, inputs, output, {"stop_strings": ["x"]}) == [[7, 1, 8], [1, 9, 0]]
    assert emitted(target, inputs, output, {}) == [[7, 1, 8, 1, 1], [1, 9, 0]]


def test_a_line_break_is_typed_as_a_stop(pair: DraftTargetPair, monkeypatch):
    seen = []
    monkeypatch.setattr(Session, "answer", lambda session, *_: seen.append(session) or {})
    result = command("generate", "the cat", "--stop", r"\n\n", "--stop", "é", "--compile", "--min-p", "0.1")
    assert result.exit_code == 0, result.stderr
    assert seen[0].options["stop_strings"] == ["\n\n", "é"]
    assert (seen[0].options["do_sample"], seen[0].pair.strategy.compile) == (True, True)


def test_lm_eval_needs_its_package(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "lm_eval" else find_spec(name))
    result = command("lm-eval", "--model", "hf-specx", "--help")
    assert (result.exit_code, "pip install lm_eval" in result.stderr) == (2, True), result.stderr


def test_few_bits_need_a_package(monkeypatch):
    monkeypatch.setattr("hf_specx.cli.options.find_spec", lambda name: None)
    result = command("generate", "a", "--quantize", "4bit")
    assert (result.exit_code, "pip install bitsandbytes" in result.stderr) == (2, True)


def test_few_bits(tmp_path: Path):
    """Of a pair, and of a target with a draft; the draft stays as it is."""
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes["head_dim"] = 32
    tokenizer, target = tiny_tokenizer(), tiny(**sizes | SIZES)
    DraftTargetPair(target, near(target, 0.1), tokenizer).save_pretrained(tmp_path / "pair")
    saved(tmp_path / "target", target, tokenizer)
    plain = ["--quantize", "4bit", "--no-do-sample", "--max-new-tokens", "6", "--json"]
    for named in (["--pair", tmp_path / "pair"], ["--target", tmp_path / "target", "--draft", "suffix"]):
        result = command("generate", "the cat", *named, *plain)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["runs"][0]["report"]["emitted"] > 0


def adapter_in(folder: Path, base: Path) -> torch.nn.Module:
    """Write a LoRA adapter for the model in a folder; returns that model with the adapter merged."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(2)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(folder)
    return wrapped.merge_and_unload()


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_a_target(tmp_path: Path):
    """Merged into the model that its config names, with the tokenizer of that; and what a broken one is told."""
    target = tiny(**SIZES)
    saved(tmp_path / "base", target, tiny_tokenizer())
    merged = adapter_in(tmp_path / "lora", tmp_path / "base")
    pair = DraftTargetPair(merged, "suffix", tiny_tokenizer())
    expected = pair.complete(["the cat"], do_sample=False, max_new_tokens=12)
    assert expected != DraftTargetPair(target, "suffix", tiny_tokenizer()).complete(["the cat"], do_sample=False)
    how = ["--draft", "suffix", "--no-do-sample", "--max-new-tokens", "12", "--json"]
    result = command("generate", "the cat", "--target", tmp_path / "lora", *how)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["runs"][0]["texts"] == expected
    result = command("generate", "the cat", "--target", tmp_path / "base", "--draft", tmp_path / "lora")
    assert (result.exit_code, "is an adapter of PEFT" in result.stderr) == (2, True), result.stderr
    config = tmp_path / "lora" / "adapter_config.json"
    values = json.loads(config.read_text())
    for change, words in (
        ({"base_model_name_or_path": str(tmp_path / "gone")}, "adapter_config.json has base_model_name_or_path"),
        ({"base_model_name_or_path": None}, "adapter_config.json has base_model_name_or_path"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
    ):
        config.write_text(json.dumps(values | change))
        result = command("generate", "the cat", "--target", tmp_path / "lora", *how)
        assert (result.exit_code, words in result.stderr) == (2, True), result.stderr
    config.write_text(json.dumps(values))
    (tmp_path / "lora" / "adapter_model.safetensors").unlink()
    result = command("generate", "the cat", "--target", tmp_path / "lora", *how)
    assert (result.exit_code, "adapter_model.safetensors" in result.stderr) == (2, True)


def test_an_adapter_without_peft(tmp_path: Path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text("{}")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "peft" else find_spec(name))
    result = command("generate", "the cat", "--target", tmp_path, "--draft", "suffix")
    assert (result.exit_code, "pip install peft" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("settings", "command_line", "shown"),
    [
        ({"do_sample": True, "temperature": 0.0}, "generate a --pair", "or give --temperature"),
        ({"do_sample": True, "top_p": 1.5}, "bench --batch-size 1", "or give --top-p"),
        ({"prompt_lookup_num_tokens": 3}, "generate a --pair", "change it there."),
    ],
)
def test_a_setting_of_a_file_names_the_file(tmp_path: Path, settings: dict, command_line: str, shown: str):
    """An error, or a warning; one that was typed does not."""
    target = tiny(**SIZES)
    pair = DraftTargetPair(target, near(target, 0.1), tiny_tokenizer())
    pair.config.prompts = ["the cat"]
    pair.save_pretrained(tmp_path / "pair")
    (tmp_path / "pair" / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 0}))
    result = command(*command_line.split(), tmp_path / "pair", "--max-new-tokens", 4)
    said = " ".join(result.stderr.split())
    (name,) = settings.keys() - {"do_sample"}
    assert f"It was not typed: {name} comes from generation_config.json of {tmp_path / 'pair'}" in said
    assert shown in said
    if name == "temperature":
        typed = command("generate", "a", "--pair", tmp_path / "pair", "--max-new-tokens", 4, "--temperature", 0.5)
        assert (typed.exit_code, "generation_config" in typed.stderr) == (0, False), typed.stderr


def test_bench_with_equal_lengths_and_latencies(folder: str, texts: str, tmp_path: Path, monkeypatch):
    """The record says on what prompts, in how many turns, and by which versions and hardware figures were made."""
    monkeypatch.setattr(sys, "argv", ["/bin/specx", "bench", "my-pair"])
    out = tmp_path / "results.json"
    options = "--batch-size 2 --max-new-tokens 9 --repeats 2 --seed 5 --ignore-eos --min-p 0.05"
    options += " --method plain --method block-2 --method lookup-4"
    result = command("bench", folder, *options.split(), "--prompts", texts, "--out", out, COLUMNS="200")
    assert result.exit_code == 0, result.stderr
    (record,) = json.loads(out.read_text())["records"]
    expected = {"seed": 5, "ignore_eos": True, "min_p": 0.05, "do_sample": True, "repeats": 2}
    assert expected.items() <= record["settings"].items()
    lengths = [len(tiny_tokenizer()(text)["input_ids"]) for text in TEXTS]
    assert record["prompts"]["count"] == len(TEXTS)
    assert record["prompts"]["tokens"]["max"] == max(lengths)
    assert f"(digest {record['prompts']['digest'][:12]}), 2 turns from seed 5" in result.stdout
    for name in ("plain", "block-2"):
        figures = record["methods"][name]
        assert [run["tokens"] for run in figures["runs"]] == [18, 18]
        latency = figures["latency"]
        assert latency.keys() == {"first_token", "between_tokens", "longest_wait"}
        assert 0 < latency["between_tokens"]["median"] <= latency["longest_wait"]["max"]
        assert latency["first_token"]["max"] < max(run["seconds"] for run in figures["runs"])
    assert "stdev" in record["methods"]["block-2"]["speedup"]
    assert "first token: milliseconds" in result.stdout
