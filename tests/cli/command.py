"""The command line, run in this process."""

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
