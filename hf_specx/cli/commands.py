"""The command line `specx`: all commands are registered here."""

import platform
import sys
from importlib.metadata import version
from typing import Annotated, Any


try:
    import rich  # noqa: F401
    import typer
except ImportError as error:
    raise SystemExit("specx needs typer and rich: in a clone of its repository, pip install '.[cli]'") from error

from hf_specx import __version__

from .bench import bench
from .check import check
from .console import INTERRUPTED, say_error
from .distill import distill
from .generate import generate
from .pairs import card, publish, vllm
from .tune import tune


WRONG_USAGE: Any = typer.BadParameter.__mro__[2]  # typer does not name the base of these errors, which is click's


class BareFlags:
    """Options that take no value are shown without a type in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(BareFlags, typer.core.TyperCommand):
    """One of them."""


class Group(BareFlags, typer.core.TyperGroup):
    """Some of them, which have a name in common."""


class Commands(Group):
    """All commands; a wrong usage ends with one line on stderr and code 2."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            code = super().main(*args, **extra | {"standalone_mode": False})
        except WRONG_USAGE as error:
            ctx = getattr(error, "ctx", None)
            where = "specx" if ctx is None else ctx.command_path
            message = error.format_message().rstrip(".")
            say_error(f"{message}{'' if message.endswith('?') else '.'} See {where} --help.")
            sys.exit(error.exit_code)
        except (typer.Abort, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_show_locals=False)
export = typer.Typer(cls=Group, help="Serve a pair with another program, for more than one process can do.")

for command in (generate, bench, tune, distill, check, card, publish):
    app.command(cls=Command)(command)
export.command(cls=Command)(vllm)
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
