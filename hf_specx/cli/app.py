"""The entry point of `specx`."""


def main() -> None:
    """Run a command; Ctrl-C ends it with code 130, also while modules are imported."""
    try:
        from .commands import app

        app(prog_name="specx")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
