"""What commands show: text in the colours of its origins, characters token by token, errors in one line."""

import pytest
import typer
from tiny_tokenizer import tiny_tokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_specx.cli import bench, coloured, console, tune
from hf_specx.common.round import RoundRecord


def test_errors_are_in_the_words_of_commands(capsys):
    with pytest.raises(typer.Exit), console.errors_in_one_line():
        raise ValueError("pass overwrite=True,\nor top_p=0.9")
    assert capsys.readouterr().err == "error: pass --overwrite, or --top-p 0.9\n"


@pytest.mark.parametrize("headings", [bench.COLUMNS, tune.TUNE_COLUMNS])
def test_tables_of_figures_fit_80_columns(capsys, headings):
    """With long names and large figures."""
    row = ["coupled-5-compiled", "123456", *["0.98-1.02"] * 2, *["123.45"] * (len(headings) - 4)]
    console.Output(width=80).figures(list(headings), [row])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_figures_are_never_cut(capsys):
    console.Output(width=20).figures(["contender", "times"], [["coupled-5-compiled", "123456.00"]])
    assert "123456.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("record", "origins"),
    [
        (RoundRecord(0, 0, 1), ["bonus"]),  # a plain step
        (RoundRecord(3, 0, 1), ["recovered"]),
        (RoundRecord(3, 2, 3), ["accepted", "accepted", "recovered"]),
        (RoundRecord(3, 3, 2), ["accepted", "accepted"]),  # ended inside the accepted run
        (RoundRecord(4, 3, 4, forced=(0, 2, 3)), ["forced", "accepted", "forced", "recovered"]),
    ],
)
def test_origins_of_a_round(record, origins):
    assert coloured.round_origins(record) == origins


def test_a_text_that_was_decoded_plainly_has_no_rounds():
    tokenizer = tiny_tokenizer()
    decoder = coloured.TokenDecoder(tokenizer, [])
    assert coloured.coloured(tokenizer("the cat")["input_ids"], [], decoder).plain == "the cat"


@pytest.mark.parametrize("text", ["plain text [red]x[/red]\n  two", "naïve 🙂 größer", "日本"])
def test_characters_split_across_tokens(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    decoder = coloured.TokenDecoder(tokenizer, tokenizer("the cat")["input_ids"])
    pieces = [decoder.push(i) for i in ids]
    assert "".join(pieces) == text
    assert decoder.rest() == ""
    assert text.isascii() == all(pieces)


def test_spaces_after_the_prompt_are_kept():
    """Where a tokenizer drops the space before the first word of a text."""
    words = Tokenizer(WordLevel({"▁the": 0, "▁cat": 1}, unk_token="▁the"))
    words.decoder = Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1]) == "cat"
    assert coloured.TokenDecoder(tokenizer, [0]).push(1) == " cat"


def test_unfinished_and_broken_characters():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("é🙂")["input_ids"]
    decoder = coloured.TokenDecoder(tokenizer, [])
    broken = [ids[0], *tokenizer("a")["input_ids"], *ids[2:4]]  # half an é, a letter, half a face
    assert [decoder.push(i) for i in broken] == ["", "\ufffda", "", ""]
    assert set(decoder.rest()) == {"\ufffd"}
