"""The command line `specx`: all commands are registered here."""

import platform
from importlib.metadata import version
from typing import Annotated


try:
    import rich  # noqa: F401
    import typer
except ImportError as error:
    raise SystemExit("specx needs typer and rich: in a clone of its repository, pip install '.[cli]'") from error

from hf_specx import __version__

from .bench import bench
from .check import check
from .distill import distill
from .generate import generate
from .lm_eval import AS_TYPED, lm_eval
from .pairs import card, publish, vllm
from .serve import serve
from .tune import tune


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, rich_markup_mode=None)
export = typer.Typer(help="Print the command by which another program serves a pair.")
for body in (generate, serve, bench, tune, distill, check, card, publish):
    app.command()(body)
app.command("lm-eval", context_settings=AS_TYPED)(lm_eval)
export.command()(vllm)
app.add_typer(export, name="export")


def show_version(wanted: bool) -> None:
    """Print the versions that a report of an error should name."""
    if wanted:
        others = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        typer.echo(f"hf_specx {__version__} ({others}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def specx(
    ctx: typer.Context,
    versions: Annotated[
        bool, typer.Option("--version", help="Print versions, and stop.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Speculative sampling for Hugging Face transformers: the same distribution, faster."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
