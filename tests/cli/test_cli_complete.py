"""`specx generate --out`: prompts from files of two kinds, an interruption, and what is refused."""

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from command import command
from tiny_tokenizer import TEXTS, tiny_tokenizer
from transformers import TopKLogitsWarper

from hf_specx import DraftTargetPair, ThinkingBudget
from hf_specx.cli import session
from hf_specx.cli.options import PromptOptions
from hf_specx.cli.prompts import FilePrompts
from hf_specx.hub.locks import locked


OPTIONS = ["--max-new-tokens", "12", "--top-k", "30"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of nine prompts."""
    file = tmp_path / "prompts.JSONL"
    lines = [json.dumps({"prompt": f"{text}\n{number}", "more": 1}) for number in range(3) for text in TEXTS]
    file.write_text("\n\n".join(lines) + "\n")
    return file


def specx(*arguments: object, input: str = "") -> Any:
    return command("generate", *arguments, input=input)


def texts_of(out: Path) -> list[str]:
    return [json.loads(line)["text"] for line in out.read_text().splitlines()]


def test_a_file_to_a_file(pair: DraftTargetPair, file: Path, tmp_path: Path):
    out = tmp_path / "done.jsonl"
    result = specx("--prompts", file, "--out", out, *OPTIONS, "--seed", "3", "--json")
    assert result.exit_code == 0, result.stderr
    prompts = [json.loads(line)["prompt"] for line in file.read_text().split("\n") if line]
    options = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 30, "max_new_tokens": 12}
    assert texts_of(out) == pair.complete(prompts, seed=3, **options)
    document = json.loads(result.stdout)
    assert (document["out"], document["seed"], document["prompts"]) == (str(out), 3, 9)
    assert document["options"] == options


def test_prompts_from_everywhere(pair: DraftTargetPair, texts: str, tmp_path: Path):
    """Arguments, lines of a file, a pipe, which can be read once, and standard input."""
    texts_of_each, (read, write) = [], os.pipe()
    os.write(write, "\n".join(TEXTS).encode())
    os.close(write)
    sources = [*TEXTS], ["--prompts", texts], ["--prompts", f"/dev/fd/{read}"], []
    for number, arguments in enumerate(sources):
        out = tmp_path / f"{number}.jsonl"
        options = f"--out {out} --no-do-sample --batch-size 2 --max-new-tokens 16"
        result = specx(*arguments, *options.split(), input="\n".join(TEXTS))
        assert result.exit_code == 0, result.stderr
        texts_of_each.append(texts_of(out))
    os.close(read)
    assert texts_of_each == [pair.complete(TEXTS, max_new_tokens=16, do_sample=False)] * 4


def test_a_file_that_is_in_use_is_refused_before_models_are_loaded(texts: str, tmp_path: Path, monkeypatch):
    loads: list[object] = []
    monkeypatch.setattr("hf_specx.cli.loading.load_named", lambda *_: loads.append(1))
    out = tmp_path / "done.jsonl"
    with locked(out):
        result = specx("--prompts", texts, "--out", out, *OPTIONS)
    assert (result.exit_code, loads) == (2, [])
    assert f"process {os.getpid()} on {socket.gethostname()}" in " ".join(result.stderr.split())


def test_a_file_of_one_schema_is_not_gone_on_with_under_another(pair: DraftTargetPair, tmp_path: Path, monkeypatch):
    def grammar(file: Path, pair: DraftTargetPair) -> TopKLogitsWarper:
        processor = TopKLogitsWarper(5)
        processor.fingerprint = file.read_text()
        return processor

    monkeypatch.setattr(session, "json_grammar", grammar)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    schema, codes = tmp_path / "schema.json", []
    for kind in ("object", "object", "array"):
        schema.write_text(json.dumps({"type": kind}))
        result = specx(*TEXTS, "--out", tmp_path / "done.jsonl", "--max-new-tokens", 8, "--json-schema", schema)
        codes.append(result.exit_code)
    assert codes == [0, 0, 2]
    assert re.search("logits_processor.*obje.*arra", result.stderr)


def test_messages_are_put_into_the_chat_template(pair: DraftTargetPair, tmp_path: Path):
    pair.tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    file, out = tmp_path / "prompts.jsonl", tmp_path / "done.jsonl"
    file.write_text('"the cat"\n{"messages": [{"role": "user", "content": "a dog"}]}\n')
    result = specx("--prompts", file, "--out", out, "--chat", "--no-do-sample", "--max-new-tokens", "8")
    assert result.exit_code == 0, result.stderr
    assert (result.stdout, result.stderr.splitlines()[-1]) == ("", f"2 texts are in {out}")
    assert texts_of(out) == pair.complete(["<the cat>", "<a dog>"], do_sample=False, max_new_tokens=8)


THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools[0].name }}{% endif %}"
    "<think>{% if not enable_thinking %}</think>{% endif %}"
)


def test_thinking_by_options_of_the_template_and_a_budget(pair: DraftTargetPair, tmp_path: Path):
    """A budget counts what the template has begun, and nothing where it has switched thinking off."""
    pair.tokenizer = pair.draft_tokenizer = tiny_tokenizer(more=("<think>", "</think>"))
    pair.tokenizer.chat_template = THINKING_TEMPLATE
    think, end = pair.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    file, found = tmp_path / "prompts.jsonl", []
    file.write_text('"the cat"\n')
    for number, is_on in enumerate([True, False]):
        out, typed = tmp_path / f"{number}.jsonl", json.dumps({"enable_thinking": is_on, "tools": [{"name": "a dog"}]})
        options = ["--prompts", file, "--chat", "--chat-template-kwargs", typed, "--max-new-tokens", 8]
        result = specx("--out", out, *options, "--no-do-sample", "--thinking-budget", 3)
        assert result.exit_code == 0, result.stderr
        ids = [*pair.tokenizer("the cata dog").input_ids, think] + ([] if is_on else [end])
        processors = [ThinkingBudget(3, start=[think], end=[end])]
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        new = pair.target.generate(**inputs, max_new_tokens=8, do_sample=False, logits_processor=processors)
        new = new[0, len(ids) :].tolist()
        assert (new[3] == end) == is_on
        assert texts_of(out) == [pair.tokenizer.decode(new, skip_special_tokens=True)]
        found += texts_of(out)
    assert found[0] != found[1]
    result = specx("--out", out, *options, "--no-do-sample", "--thinking-budget", 4)  # the file is of another budget
    assert (result.exit_code, "logits_processor" in result.stderr) == (2, True)
    shown = json.loads(specx(*options, "--no-do-sample", "--thinking-budget", 3, "--json").stdout)
    assert shown["runs"][0]["texts"] == found[1:]


def test_a_budget_needs_tags(pair: DraftTargetPair):
    result = specx("the cat", "--thinking-budget", 3)
    assert (result.exit_code, "no <think> and no </think>" in result.stderr) == (2, True)


def test_refused_prompts_are_counted_and_end_with_another_code(pair: DraftTargetPair, tmp_path: Path):
    """Also when the command is repeated, and nothing is left to do."""
    file, out = tmp_path / "prompts.jsonl", tmp_path / "done.jsonl"
    file.write_text('"the cat"\n""\n"a dog"\n')
    for _ in range(2):
        result = specx("--prompts", file, "--out", out, "--no-do-sample", "--max-new-tokens", "4", "--json")
        values = json.loads(result.stdout)
        assert (result.exit_code, values["prompts"], values["refused"]) == (2, 3, 1)
    result = specx("--prompts", file, "--out", out, "--no-do-sample", "--max-new-tokens", "4")
    assert (result.exit_code, "refused prompts: 1 of 3" in result.stderr) == (2, True)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_prompts_of_a_file_are_those_of_read_prompts(tmp_path: Path, ending: str):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeff a \u2028b".encode() + ending.encode() * 2 + b"\x0cc ")
    assert list(FilePrompts(PromptOptions(file))) == [" a \u2028b", "\x0cc "]
    assert len(FilePrompts(PromptOptions(file))) == 2
    file.write_bytes(b"a\n\xff\n")
    with pytest.raises(ValueError, match="UTF-8"):
        list(FilePrompts(PromptOptions(file)))
