"""The command line `specx`: all commands are registered here."""

from transformers.utils import logging


try:
    import rich  # noqa: F401
    import typer
except ImportError as error:
    raise SystemExit("specx needs typer and rich: in a clone of its repository, pip install '.[cli]'") from error

from .bench import bench
from .check import check
from .distill import distill
from .generate import generate
from .pairs import card, publish, vllm
from .tune import tune


app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)
export = typer.Typer(no_args_is_help=True, help="Serve a pair with another program, for more than one process can do.")

for command in (generate, bench, tune, distill, check, card, publish):
    app.command()(command)
export.command()(vllm)
app.add_typer(export, name="export")


def main() -> None:
    """The entry point."""
    app()


@app.callback()
def specx() -> None:
    """Speculative sampling for Hugging Face transformers: the same distribution, faster."""
    logging.set_verbosity_error()  # its warnings and progress bars would mix with the output
    logging.disable_progress_bar()
