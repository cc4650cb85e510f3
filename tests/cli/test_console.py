"""What commands show: text in the colours of its origins, characters token by token, errors in one line."""

import warnings

import pytest
import typer
from tiny_tokenizer import tiny_tokenizer

from hf_specx.cli import coloured, console
from hf_specx.common.round import RoundRecord


def test_errors_and_warnings_are_lines_in_the_words_of_commands(capsys):
    def work():
        with console.errors_in_one_line():
            warnings.warn("leave\ntop_k=5 out", stacklevel=1)
            raise ValueError("pass overwrite=True,\nor top_p=0.9")

    with pytest.raises(typer.Exit):
        work()
    said = "warning: leave --top-k 5 out\nerror: pass --overwrite, or --top-p 0.9\n"
    assert capsys.readouterr().err == said


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


@pytest.mark.parametrize("text", ["plain text [red]x[/red]\n  two", "naïve 🙂 größer", "日本"])
def test_characters_split_across_tokens(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    decoder = coloured.TokenDecoder(tokenizer, tokenizer("the cat")["input_ids"])
    pieces = [decoder.push(i) for i in ids]
    assert "".join(pieces) == text
    assert decoder.rest() == ""
    assert text.isascii() == all(pieces)


def test_unfinished_and_broken_characters():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("é🙂")["input_ids"]
    decoder = coloured.TokenDecoder(tokenizer, [])
    broken = [ids[0], *tokenizer("a")["input_ids"], *ids[2:4]]  # half an é, a letter, half a face
    assert [decoder.push(i) for i in broken] == ["", "\ufffda", "", ""]
    assert set(decoder.rest()) == {"\ufffd"}
