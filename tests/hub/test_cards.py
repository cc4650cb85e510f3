"""Model cards: what they say of a config, that text from elsewhere stays text, and that their examples run."""

import dataclasses
import re
import shlex
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from card_cases import full, measured
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from tiny import near, tiny
from tiny_tokenizer import tiny_tokenizer
from transformers import (
    AutoProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)
from typer.main import get_command

from hf_specx import DraftTargetPair
from hf_specx.cli.commands import app
from hf_specx.common.drafts import PAIR_CONFIG_NAME
from hf_specx.hub.cards import embedded_card, render, write_embedded_card
from hf_specx.hub.pair_config import ModelSource, PairConfig
from hf_specx.hub.publish import pair_as_it_is, save, write_folder


CARDS = Path(__file__).parents[2] / "model_cards"
HOSTILE = (
    "x | y ``` `` ` <b>&amp; [a](b) {{ 1 }} \\| \\\\| *c*\n\n## Heading\n| a |\n---\nlicense: mit\n```\n<i>\nevil()"
)


def parsed(text: str) -> list:
    return MarkdownIt().enable("table").parse(text)


def headings(card: str) -> list[str]:
    return [after.content for token, after in pairwise(parsed(ModelCard(card).text)) if token.type == "heading_open"]


def blocks(card: str, language: str) -> list[str]:
    tokens = parsed(ModelCard(card).text)
    return [token.content for token in tokens if token.type == "fence" and token.info == language]


def every_string(value, text):
    """The same config with `text` in place of every string in it, but for the notes."""
    if isinstance(value, str):
        return text
    if isinstance(value, list):
        return [every_string(item, text) for item in value]
    if isinstance(value, dict):
        return {every_string(key, text): every_string(item, text) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return type(value)(**{k: v if k == "notes" else every_string(v, text) for k, v in values.items()})
    return value


def two_ids() -> str:
    """The card of two models on the Hub that no config knows more of."""
    return render(PairConfig(ModelSource("org/target"), ModelSource("org/draft")), "org/target with org/draft")


def test_the_cards_of_this_repository_are_what_is_rendered(tmp_path: Path):
    """All facts and figures of the embedded pair."""
    file = write_embedded_card(tmp_path / "new")
    assert file.read_text(encoding="utf-8") == (CARDS / file.name).read_text(encoding="utf-8")


def test_where_the_models_and_the_code_are():
    card = ModelCard(render(full(), "org/pair", published=True))
    assert "| model | inside | `org/draft`, in `small` |\n| revision | - | `c0ffee` |" in card.text
    assert (card.data.base_model, card.data.to_dict().get("base_model_relation")) == (None, None)
    assert "custom_generate" in card.data.tags
    for plain in (two_ids(), render(full(), "embedded"), render(full(), "my-pair")):
        assert "custom_generate" not in ModelCard(plain).data.tags  # there is no code beside it


def test_two_models_that_are_named_are_not_declared_a_merge():
    """The Hub takes a list of base models for one; the draft is named in the text alone."""
    two = full(target=ModelSource("org/target"), draft=ModelSource("org/draft"))
    for text in (render(two, "org/pair", published=True), two_ids()):
        card = ModelCard(text)
        assert isinstance(card.data.base_model, str)
        assert card.data.base_model_relation == "adapter"
    assert ModelCard(render(two, "org/pair")).data.base_model == "org/target"
    assert "`org/draft`" in render(two, "org/pair")


@pytest.mark.parametrize("speedup", [0.9, 1.1])
def test_a_pair_that_does_not_pay_says_so(speedup: float):
    """Nor is a figure made up where none was measured, or nothing judged."""
    unknown = measured(measured_speedup=speedup, cost_coefficient=None, alpha=0.0)
    card = render(full(measurements=[unknown]), "org/pair")
    assert ("draft was slower than plain" in card) == (speedup < 1)
    assert "| - | *not measured* | 2.35 |" in card  # α, c, and the tokens of a round


def test_no_folder_of_this_machine_is_published(tmp_path: Path):
    """Neither in the card nor in the config beside it."""
    unchanged = "specx tune org/target org/draft --url https://host/a/b/c\none 'quote that does not end"
    typed = f"specx tune '/home/me/a model' ~/drafts/small --file=../my/prompts.txt --out ./pair\n{unchanged}"
    shown = f"specx tune 'a model' small --file=prompts.txt --out pair\n{unchanged}"
    assert blocks(render(full(measurements=[measured(command=typed)]), "org/pair"), "bash")[-1] == f"{shown}\n"
    pair = DraftTargetPair(tiny(), tiny(seed=1))
    pair.config.measurements = [measured(command=typed)]
    pair.save_pretrained(tmp_path / "pair")
    assert PairConfig.from_file(tmp_path / "pair" / PAIR_CONFIG_NAME).measurements[0].command == shown
    assert pair.config.measurements[0].command == typed


@pytest.mark.parametrize(
    ("name", "published", "ids"),
    [("org/pair", True, False), (HOSTILE, True, True), (HOSTILE, False, False), (HOSTILE, False, True)],
)
def test_text_from_elsewhere_stays_text(name: str, published: bool, ids: bool):
    """No heading, table cell, code block, HTML or field of the front matter comes from inside a value."""
    by_id = {"target": ModelSource("org/t"), "draft": ModelSource("org/d")} if ids else {}
    honest, hostile = full(**by_id), every_string(full(**by_id), HOSTILE)
    hostile.num_draft_tokens = 3
    cards = [render(honest, "org/pair", published=published), render(hostile, name, published=published)]
    tokens = [parsed(ModelCard(card).text) for card in cards]
    assert [token.type for token in tokens[1]] == [token.type for token in tokens[0]]
    children = [child for token in tokens[1] for child in token.children or []]
    assert not {child.type for child in children} & {"html_inline", "link_open", "image"}
    assert headings(cards[1])[1:] == headings(cards[0])[1:]
    data = [ModelCard(card).data.to_dict() for card in cards]
    assert data[1].keys() == data[0].keys()
    assert (data[1]["license"], data[1]["tags"]) == (HOSTILE, data[0]["tags"])
    assert all(compile(code, "", "exec") for code in blocks(cards[1], "python"))


def test_the_class_that_loads_the_target():
    """One that we know, or that of language models."""
    text, speech = ("AutoModelForCausalLM", "text-generation"), "AutoModelForSpeechSeq2Seq"
    expected = {None: text, "os.system": text, speech: (speech, "automatic-speech-recognition")}
    for noted, (auto_class, task) in expected.items():
        card = render(full(target=ModelSource(auto_class=noted)), "org/pair", published=True)
        assert f'{auto_class}.from_pretrained("org/pair", dtype="auto")' in card
        assert ModelCard(card).data.pipeline_tag == task
        assert ("do_sample=True" in "".join(blocks(card, "python"))) == (auto_class != speech)  # speech is transcribed


def test_a_whisper_has_its_draft_by_one_name():
    """Its `generate` would change the text if it saw `assistant_model`."""
    cards = [
        render(full(target=ModelSource(model_type=kind)), "org/pair", published=True) for kind in ("t5", "whisper")
    ]
    assert ["`assistant_model` is the same" in card for card in cards] == [True, False]


SPEECH = "AutoModelForSpeechSeq2Seq"
PLACES = {  # where the target is, whether a processor was saved, and from where the examples have one
    "inside": (ModelSource(auto_class=SPEECH), False, None),
    "inside, with a processor": (ModelSource(auto_class=SPEECH), True, "org/pair"),
    "elsewhere": (ModelSource("org/target", auto_class=SPEECH), False, "org/target"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("published", [True, False])
def test_a_processor_is_named_where_there_is_one(place: str, published: bool):
    target, processor, source = PLACES[place]
    card = render(full(target=target, processor=processor), "org/pair", published=published)
    assert ("AutoProcessor" in card) == (source is not None)
    assert (f'AutoProcessor.from_pretrained("{source}")' in card) == (source is not None)
    assert ("none is saved with this pair" in card) == (source is None)
    assert all(compile(code, "card", "exec") for code in blocks(card, "python"))


@pytest.mark.parametrize("has_processor", [True, False])
def test_a_speech_pair_and_its_processor(tmp_path: Path, has_processor: bool):
    """What its card loads is there: after saving, and after publishing the saved files."""
    sizes = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "encoder_layers"), 2)
    sizes |= {"vocab_size": 280, "d_model": 32, "decoder_layers": 1, "max_source_positions": 8, "num_mel_bins": 8}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "pad_token_id": 0}
    target, draft = (WhisperForConditionalGeneration(WhisperConfig(**sizes)).eval() for _ in range(2))
    extractor = WhisperFeatureExtractor(feature_size=8, n_fft=64)
    tokenizer = tiny_tokenizer()
    processor = WhisperProcessor(extractor, tokenizer) if has_processor else None
    save(DraftTargetPair(target, draft, tokenizer, processor=processor), tmp_path / "pair", with_code=True)
    write_folder(pair_as_it_is(tmp_path / "pair"), tmp_path / "again", with_code=True)
    for folder in (tmp_path / "pair", tmp_path / "again"):
        assert ("AutoProcessor" in (folder / "README.md").read_text()) == has_processor
        if has_processor:
            again = AutoProcessor.from_pretrained(folder)
            assert (type(again), again.feature_extractor.feature_size) == (WhisperProcessor, 8)
    loaded = DraftTargetPair.from_pretrained(tmp_path / "pair")
    with warnings.catch_warnings(record=True) as warned:
        save(loaded, tmp_path / "without")
    assert any("is saved without it; set pair.processor" in str(each.message) for each in warned) == has_processor


def run_examples(card: str) -> tuple[dict, list[torch.Tensor]]:
    """Run a card's examples one after the other, each text under the same seed, and collect what they make."""
    scope, outputs = {}, []
    for code in blocks(card.replace("max_new_tokens=128", "max_new_tokens=24"), "python"):
        for statement in re.split(r"(?m)^(?=out = )", code):
            torch.manual_seed(0)
            exec(compile(statement, "card", "exec"), scope)
            if statement.startswith("out = "):
                outputs.append(scope["out"])
    return scope, outputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of a tiny pair."""
    tokenizer = DraftTargetPair.embedded().tokenizer
    target = tiny(vocab_size=len(tokenizer), max_position_embeddings=256)
    pair = DraftTargetPair(target, near(target, 0.05), tokenizer)
    pair.config.num_draft_tokens, pair.config.verification = 3, "coupled"
    path = tmp_path_factory.mktemp("cards") / "pair"
    save(pair, path, with_code=True)
    return path


def test_the_examples_of_a_repository_run_as_they_stand(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """By name, bound, loaded once and with the package: four times the tokens of plain sampling; beside the folder."""
    card = (folder / "README.md").read_text()
    assert str(folder.parent) not in card
    monkeypatch.chdir(folder.parent)
    scope, outputs = run_examples(card)
    assert len(outputs) == 4
    torch.manual_seed(0)
    plain = scope["pair"].target.generate(**scope["inputs"], max_new_tokens=24, do_sample=True)
    assert all(torch.equal(out, plain) for out in outputs)
    assert scope["pair"].report.verification == "coupled"


def test_the_examples_of_other_pairs_run_as_they_stand(folder: Path):
    """Of the embedded pair, of a pair without code, and of two repositories."""
    DraftTargetPair.embedded().tokenizer.save_pretrained(folder / "draft")
    two = PairConfig(ModelSource(str(folder)), ModelSource(str(folder / "draft")))
    of_pair = render(PairConfig.from_file(folder / PAIR_CONFIG_NAME), str(folder))
    for card in (embedded_card(), of_pair, render(two, "two models")):
        scope, outputs = run_examples(card)
        assert len(outputs) == 1
        assert (scope["pair"] if "pair" in scope else scope["strategy"]).report.rounds > 0


def test_the_commands_in_a_card_are_those_of_specx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They are parsed, by the command line itself, and not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("Once upon a time")
    lines = "".join(blocks(two_ids(), "bash")).splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("specx ")]
    for command, *arguments in commands:
        get_command(app).commands[command].make_context(command, arguments)
    assert [words[0] for words in commands] == ["tune", "publish"]


def test_a_measurement_says_how_text_was_drawn_and_how_sure_it_is():
    drawn = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "max_new_tokens": 64, "prompts": 24, "turns": 4711}
    sure = measured(**drawn, interval_low=1.21, interval_high=1.58)
    less = measured(max_new_tokens=8, prompts=2, turns=9)
    card = render(full(measurements=[sure, less]), "org/pair")
    rows = [[cell.strip() for cell in line.split("|")] for line in card.splitlines()]
    of_sure, of_less = (next(row for row in rows if turns in row) for turns in ("4711", "9"))
    assert "1.21 to 1.58" in of_sure
    assert all(figure in of_sure[-2] for figure in ("0.7", "0.9", "50", "64", "24"))
    assert "*not measured*" in of_less
    assert "greedily" in of_less[-2]
