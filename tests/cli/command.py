"""The command line, run in this process."""

from pathlib import Path

from tiny import near, tiny
from tiny_tokenizer import tiny_tokenizer
from transformers.utils import logging
from typer.testing import CliRunner

from hf_specx.cli.commands import app


def command(*arguments: object, input: str | None = None, **env: str):
    """What `specx` with these arguments wrote, and its exit code; errors that it does not handle are raised.

    It silences transformers, which other tests may want to hear.
    """
    verbosity = logging.get_verbosity()
    try:
        runner = CliRunner(env={"TERM": "dumb"} | env)
        result = runner.invoke(app, list(map(str, arguments)), input=input)
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def saved_models(root: Path, sizes: dict, noise: float) -> dict[str, str]:
    """Folders of a "target", a "draft" for it, moved by that noise, and a "stranger" with a tokenizer of its own."""
    target = tiny(**sizes)
    parts = {
        "target": (target, tiny_tokenizer()),
        "draft": (near(target, noise), tiny_tokenizer()),
        "stranger": (tiny(**sizes), tiny_tokenizer(["some other words"])),
    }
    for name, (model, tokenizer) in parts.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: str(root / name) for name in parts}
