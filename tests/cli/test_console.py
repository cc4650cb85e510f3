"""What commands show: text in the colours of its origins, characters token by token, errors in one line."""

import warnings

import pytest
import torch
import typer
from tiny_tokenizer import tiny_tokenizer

from hf_specx.cli import coloured, console
from hf_specx.common.errors import OptionError
from hf_specx.common.round import RoundRecord


def ended_by(error: Exception, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a command whose work raises an error, and what is on stderr."""
    with pytest.raises(typer.Exit) as ended, console.errors_in_one_line():
        raise error
    return ended.value.exit_code, capsys.readouterr().err


def test_errors_and_warnings_are_lines(capsys):
    with console.errors_in_one_line():
        warnings.warn("leave\ntop_k out", stacklevel=1)
        warnings.warn("who wrote this code must change it", FutureWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: leave top_k out\n"
    assert ended_by(ValueError("leave it\nout"), capsys) == (2, "error: leave it out\n")


def test_an_option_that_an_error_is_about_is_called_as_it_is_typed(capsys):
    assert ended_by(OptionError("top_p", 1.5, "is too much"), capsys) == (2, "error: --top-p 1.5 is too much\n")
    assert ended_by(OptionError("layout", "x", "is unknown"), capsys) == (2, "error: layout='x' is unknown\n")
    assert str(OptionError("top_p", 1.5, "is too much")) == "top_p=1.5 is too much"


def test_paths_and_prompts_in_messages_stay_as_they_are(capsys):
    """Also where they look like options in Python; they were rewritten before."""
    text = "runs/top_k=5/done.jsonl is there already; prompt 'set overwrite=True' is of temperature=1, do_sample=False"
    assert ended_by(ValueError(text), capsys) == (2, f"error: {text}\n")
    code, errors = ended_by(OptionError("repeats", "top_k=5", "is none in runs/repeats=3"), capsys)
    assert (code, errors) == (2, "error: --repeats 'top_k=5' is none in runs/repeats=3\n")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 bytes"),
        MemoryError(),
    ],
    ids=["accelerator", "cpu", "python"],
)
def test_too_little_memory_is_said_with_the_remedy(capsys, error):
    """With the code of what a user can correct: 1 is for a failed check alone."""
    code, errors = ended_by(error, capsys)
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith("error: memory")
    assert str(error) in errors


def test_an_error_of_ours_has_a_traceback_and_a_code_of_its_own(capsys):
    code, errors = ended_by(KeyError("lost"), capsys)
    assert (code, errors.rstrip().splitlines()[-1]) == (3, "KeyError: 'lost'")
    assert "Traceback" in errors


def test_figures_are_never_cut(capsys):
    console.Output(width=20).figures(["method", "times"], [["coupled-5-compiled", "123456.00"]])
    assert "123456.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("record", "origins"),
    [
        (RoundRecord(0, 0, 1, is_bonus=True), ["bonus"]),  # a plain step
        (RoundRecord(3, 0, 1), ["recovered"]),
        (RoundRecord(3, 2, 3), ["accepted", "accepted", "recovered"]),
        (RoundRecord(3, 3, 2, is_bonus=True), ["accepted", "accepted"]),  # ended inside the accepted run
        (RoundRecord(4, 3, 4, forced=(0, 2, 3)), ["forced", "accepted", "forced", "recovered"]),
        # of trees: as many as first choices, and others behind them; a leaf; and off the chain, where none was forced
        (RoundRecord(2, 2, 3, nodes=6, ranks=(0, 1)), ["accepted", "accepted", "recovered"]),
        (RoundRecord(3, 1, 2, nodes=6, ranks=(1,), is_bonus=True), ["accepted", "bonus"]),
        (RoundRecord(3, 3, 4, (0, 2), 6, (0, 1, 0)), ["forced", "accepted", "accepted", "recovered"]),
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
