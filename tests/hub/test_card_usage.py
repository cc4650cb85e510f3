"""The examples and commands of model cards, run as they stand."""

import dataclasses
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from card_cases import blocks, full
from huggingface_hub import ModelCard
from tiny import near, tiny
from typer.main import get_command

from hf_specx import DraftTargetPair
from hf_specx.cli.commands import app
from hf_specx.hub.cards import known_card, render
from hf_specx.hub.publish import write_repository
from hf_specx.pair_files.pair_config import ModelSource, PairConfig


@pytest.mark.parametrize(
    ("model_type", "noted", "auto_class", "task"),
    [
        ("qwen3", None, "AutoModelForCausalLM", "text-generation"),
        ("t5", None, "AutoModelForSeq2SeqLM", None),
        ("whisper", None, "AutoModelForSpeechSeq2Seq", "automatic-speech-recognition"),
        ("t5_gemma_module", "AutoModelForSeq2SeqLM", "AutoModelForSeq2SeqLM", None),  # the type of its text decoder
        ("llama", "AutoModelForImageTextToText", "AutoModelForImageTextToText", "image-text-to-text"),
        ("t5", "AutoModelForNothing", "AutoModelForSeq2SeqLM", None),
    ],
)
def test_the_class_that_loads_the_target(model_type: str, noted: str | None, auto_class: str, task: str | None):
    target = ModelSource(model_type=model_type, auto_class=noted)
    card = render(full(target=target), "org/pair", published=True)
    assert f'{auto_class}.from_pretrained("org/pair", dtype="auto")' in card
    assert ModelCard(card).data.pipeline_tag == task
    assert ("AutoProcessor" in card) == ("Speech" in auto_class or "Image" in auto_class)


def test_well_known_pairs_of_encoder_decoders_are_loaded_as_such():
    card = known_card("flan-t5-xxl-with-small")
    for name in ("xxl", "small"):
        assert f'AutoModelForSeq2SeqLM.from_pretrained("google/flan-t5-{name}", dtype="auto")' in card


def run_examples(card: str) -> tuple[dict, list[torch.Tensor]]:
    """Run a card's examples one after the other, each text under the same seed, and collect what they make."""
    scope, made = {}, []
    for code in blocks(card, "python"):
        for statement in re.split(r"(?m)^(?=out = )", code):
            torch.manual_seed(0)
            exec(compile(statement, "card", "exec"), scope)
            if statement.startswith("out = "):
                made.append(scope["out"])
    return scope, made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of a tiny pair."""
    tokenizer = DraftTargetPair.embedded().tokenizer
    target = tiny(vocab_size=len(tokenizer), max_position_embeddings=256)
    pair = DraftTargetPair(target, near(target, 0.05), tokenizer)
    pair.config.num_draft_tokens, pair.config.verification = 3, "coupled"
    path = tmp_path_factory.mktemp("cards") / "pair"
    write_repository(pair, path)
    return path


def test_the_examples_of_a_repository_run_as_they_stand(folder: Path):
    """By name, bound, loaded once, without requests and with the package: five times the tokens of plain sampling."""
    card = (folder / "README.md").read_text()
    assert "\n# pair\n" in card
    scope, made = run_examples(card)
    assert len(made) == 5
    torch.manual_seed(0)
    plain = scope["pair"].target.generate(**scope["inputs"], max_new_tokens=128, do_sample=True)
    assert all(torch.equal(out, plain) for out in made)
    assert scope["pair"].report.verification == "coupled"


def test_the_example_of_a_pair_without_code_runs_as_it_stands(folder: Path):
    config = PairConfig.from_file(folder / "specx_config.json")
    scope, made = run_examples(render(config, str(folder)))
    assert [out.shape for out in made] == [(1, scope["inputs"]["input_ids"].shape[1] + 128)]
    assert scope["pair"].report.verification == "coupled"


@pytest.mark.parametrize(
    ("name", "chats"),
    [
        ("org/Tiny-Instruct", True),
        ("org/tiny-2b-it", True),
        ("org/tiny-Chat-v1", True),
        ("org/tiny-instructor", False),
        ("org/tiny-with-bits", False),
    ],
)
def test_models_that_were_taught_to_chat_are_shown_a_conversation(name: str, chats: bool):
    named = dataclasses.replace(full().draft, name=name)
    for card in (render(full(target=named), "org/pair"), render(full(), name, published=True)):
        assert ("apply_chat_template" in card) == chats
        assert ("Once upon a time" in card) == (not chats)


def test_the_example_of_a_conversation_runs_as_it_stands(folder: Path, tmp_path: Path):
    place = tmp_path / "tiny-instruct"
    shutil.copytree(folder, place)
    (place / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    scope, made = run_examples(render(PairConfig.from_file(place / "specx_config.json"), str(place)))
    prompt = scope["tokenizer"]("[Tell a story.]")["input_ids"]
    assert made[0][0, : len(prompt)].tolist() == prompt


def test_the_examples_of_two_repositories_run_as_they_stand(folder: Path):
    tokenizer = DraftTargetPair.embedded().tokenizer
    tokenizer.save_pretrained(folder / "draft")
    config = PairConfig(ModelSource(str(folder)), ModelSource(str(folder / "draft")))
    scope, made = run_examples(render(config, "two models"))
    assert [out.shape for out in made] == [(1, scope["inputs"]["input_ids"].shape[1] + 128)]
    assert scope["strategy"].report.rounds > 0


def test_the_example_of_the_embedded_pair_runs_as_it_stands():
    scope, made = run_examples(known_card("embedded"))
    assert [out.shape[0] for out in made] == [1]
    assert scope["pair"].report.rounds > 0


@pytest.mark.parametrize("name", ["embedded", "opt-6.7b-with-125m"])
def test_the_commands_in_a_card_are_those_of_specx(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They are parsed, by the command line itself, and not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("Once upon a time")
    lines = [shlex.split(line) for text in blocks(known_card(name), "bash") for line in text.splitlines()]
    commands = [words[1:] for words in lines if words[0] == "specx"]
    for command, *arguments in commands:
        get_command(app).commands[command].make_context(command, arguments)
    assert [words[0] for words in commands] == (["publish"] if name == "embedded" else ["tune", "publish"])


def test_a_pinned_reference_is_loaded_at_its_commit():
    """Where the target is elsewhere, nothing is bound to it."""
    target = dataclasses.replace(full().draft, name="org/target")
    card = render(full(target=target), "org/pair", published=True)
    place = '"org/target", revision="c0ffee", subfolder="small"'
    assert f'AutoModelForCausalLM.from_pretrained({place}, dtype="auto")' in card
    assert f"AutoTokenizer.from_pretrained({place})" in card
    assert 'from_pretrained("org/pair", dtype' not in card
