"""Model cards: what they say of a config, and that text from elsewhere stays text."""

import dataclasses
import re
from itertools import pairwise
from pathlib import Path

import pytest
from card_cases import blocks, body, full, measured
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from hf_specx import DraftTargetPair
from hf_specx.hub.cards import known_card, render, write_cards
from hf_specx.hub.known_pairs import KNOWN_PAIRS
from hf_specx.pair_files.pair_config import ModelSource, PairConfig


CARDS = Path(__file__).parents[2] / "model_cards"
SECTIONS = [
    "Description",
    "Base model",
    "Model compatibility",
    "Additional Arguments",
    "Output Type changes",
    "Example usage",
    "Measured",
    "How it was checked, and limits",
    "Licence",
]
HOSTILE = "x | y ``` `` ` <b>&amp; [a](b) \\| \\\\| *c*\n\n## Heading\n| a |\n---\nlicense: mit\n```\n<i>\nevil()"


def headings(card: str) -> list[str]:
    tokens = MarkdownIt().enable("table").parse(body(card))
    return [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]


def section(card: str, name: str) -> str:
    return body(card).split(f"## {name}\n")[1].split("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """Cells as they are shown."""
    tokens = MarkdownIt().enable("table").parse(text)
    rows: list[list[str]] = []
    for token, after in pairwise(tokens):
        if token.type == "tr_open":
            rows.append([])
        elif token.type in ("th_open", "td_open"):
            rows[-1].append("".join(child.content for child in after.children))
    return rows


def every_string(value, text):
    """The same config with `text` in place of every string in it, but for the notes."""
    if isinstance(value, str):
        return text
    if isinstance(value, list):
        return [every_string(item, text) for item in value]
    if isinstance(value, dict):
        return {every_string(key, text): every_string(item, text) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return type(value)(**{k: v if k == "notes" else every_string(v, text) for k, v in given.items()})
    return value


@pytest.mark.parametrize("pair", KNOWN_PAIRS, ids=lambda pair: pair.name)
def test_the_card_of_a_known_pair_is_what_is_rendered(pair):
    """And it claims nothing but the ids, which a config may have."""
    card = (CARDS / f"{pair.name}.md").read_text(encoding="utf-8")
    assert card == render(pair.config(), pair.title) == known_card(pair.name)
    assert PairConfig.from_text(pair.config().to_text().encode(), "") == pair.config()
    models = table(section(card, "Base model"))
    assert models[1:3] == [["model", pair.target, pair.draft], ["revision", "not pinned", "not pinned"]]
    assert {cell for row in models[3:] for cell in row[1:]} == {"not checked"}
    assert section(card, "Measured").strip() == "*not measured*."
    assert "Tokenizers: *not checked*" in card
    assert ModelCard(card).data.base_model == [pair.target, pair.draft]
    assert f"specx tune {pair.target} {pair.draft} --prompts prompts.txt" in blocks(card, "bash")[0]


def test_the_card_of_the_embedded_pair_is_what_is_rendered():
    config = DraftTargetPair.embedded().config
    card = (CARDS / "embedded.md").read_text(encoding="utf-8")
    assert card == render(config, "embedded") == known_card("embedded")
    assert ["parameters", "13,902,080", "2,655,488"] in table(section(card, "Base model"))
    assert ModelCard(card).data.to_dict().get("base_model") is None


def test_the_folder_of_cards_holds_one_a_pair(tmp_path: Path):
    written = {path.name: path.read_text(encoding="utf-8") for path in write_cards(tmp_path / "new")}
    assert written == {path.name: path.read_text(encoding="utf-8") for path in CARDS.iterdir()}


def test_an_unknown_pair_is_refused_with_the_name_that_was_meant():
    with pytest.raises(ValueError, match=r"'qwen3-8b-with-0.6' is no folder.*did you mean 'qwen3-8b-with-0.6b'"):
        known_card("qwen3-8b-with-0.6")


def test_front_matter_and_sections():
    card = render(full(), "org/pair", published=True)
    assert ModelCard(card).data.to_dict() == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["custom_generate", "speculative-decoding", "draft-model"],
        "base_model": ["org/draft"],
    }
    assert headings(card) == ["org/pair", *SECTIONS, "How it was made"]
    assert card.endswith("## How it was made\n\nBy hand.\n")
    assert card == render(full(), "org/pair", published=True)


def test_what_has_no_code_beside_it_does_not_say_so():
    for card in (known_card("opt-6.7b-with-125m"), render(full(), "embedded"), render(full(), "my-pair")):
        assert ModelCard(card).data.tags == ["speculative-decoding", "draft-model"]
        assert "custom_generate/" not in card
    assert "The package `hf_specx` loads it." in card
    assert 'DraftTargetPair.from_pretrained("my-pair")' in card
    assert "# embedded\n" in render(full(), "embedded", published=True)  # a repository of that name is another pair


def test_every_fact_and_figure_is_shown():
    card = render(full(), "org/pair")
    assert "not checked" not in card
    assert "not measured" not in card
    assert table(section(card, "Base model"))[1:] == [
        ["model", "inside", "org/draft, in small"],
        ["revision", "-", "c0ffee"],
        ["type", "llama", "llama"],
        ["parameters", "12,345", "12,345"],
        ["logits a position", "48", "48"],
        ["longest text, tokens", "128", "128"],
        ["precision", "float32", "float32"],
    ]
    arguments = {row[0]: row[1] for row in table(section(card, "Additional Arguments"))}
    assert {"num_draft_tokens": "3", "verification": "token", "layout": "padded"}.items() <= arguments.items()
    assert "the same 48 tokens with the same ids in both, compared one by one, `eos_token` `</s>`" in card
    assert section(card, "Licence").startswith("\n`apache-2.0`.")


def test_measurements_stand_by_where_and_how_they_were_made():
    runs = [measured(batch=1), measured(), measured(command="specx tune a b --dtype float32")]
    text = section(render(full(measurements=runs), "org/pair"), "Measured")
    numbers = ["0.749", "0.18", "2.35", "1.69", "1.74", "1.39"]
    rows = [row for row in table(text) if row[0] != "batch"]
    assert [row[0] for row in rows] == ["1", "8", "8"]
    assert all(row[1:] == ["bfloat16", "block", "4", "ragged", *numbers] for row in rows)
    assert text.count("On `a processor`, `torch 2.13.0`, `transformers 5.23.0`:") == 2
    assert re.findall(r"```bash\n(.*)\n```", text) == ["specx tune a b", "specx tune a b --dtype float32"]


def test_what_is_missing_is_said_to_be_missing():
    absent = measured(cost_coefficient=None, expected_speedup=None, forward_limited_speedup=None)
    facts = ModelSource(model_type="llama")
    config = full(target=facts, tokenizers=None, license=None, measurements=[absent])
    card = render(config, "org/pair")
    last = table(section(card, "Measured"))[-1]
    assert [last[6], last[8], last[9], last[10]] == ["not measured"] * 3 + ["1.39"]
    models = {row[0]: row[1] for row in table(section(card, "Base model"))}
    assert models["parameters"] == models["logits a position"] == models["precision"] == "not checked"
    assert models["longest text, tokens"] == "no limit in its config"  # its files were read, and have none
    assert "Tokenizers: *not checked*" in card
    assert section(card, "Licence").startswith("\n*not checked*.")
    assert "license" not in ModelCard(card).data.to_dict()


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("name", ["org/pair", HOSTILE])
def test_text_from_elsewhere_stays_text(name: str, published: bool):
    """No heading, table cell, code block, HTML or field of the front matter comes from inside a value."""
    honest, hostile = full(), every_string(full(), HOSTILE)
    hostile.num_draft_tokens = 3
    cards = {
        "honest": render(honest, "org/pair", published=published),
        "hostile": render(hostile, name, published=published),
    }
    parsed = {key: MarkdownIt().enable("table").parse(body(card)) for key, card in cards.items()}
    assert [token.type for token in parsed["hostile"]] == [token.type for token in parsed["honest"]]
    children = [child for token in parsed["hostile"] for child in token.children or []]
    assert not {child.type for child in children} & {"html_inline", "link_open", "image"}
    assert headings(cards["hostile"])[1:] == headings(cards["honest"])[1:]
    shown = table(section(cards["hostile"], "Base model"))[3]  # backslashes before a bar are its escapes
    assert [cell.replace("\\", "") for cell in shown] == ["type", *[" ".join(HOSTILE.replace("\\", "").split())] * 2]
    data = [ModelCard(card).data.to_dict() for card in cards.values()]
    assert data[1] == data[0] | {"license": HOSTILE, "base_model": [HOSTILE]} | {"pipeline_tag": "text-generation"}
    assert all(compile(code, "", "exec") for code in blocks(cards["hostile"], "python"))
