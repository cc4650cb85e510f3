"""`specx card`, `specx publish` and `specx export`: commands for a pair that exists."""

from pathlib import Path
from typing import Annotated

import typer

from hf_specx.common.drafts import split_revision
from hf_specx.common.errors import require
from hf_specx.hub.folders import OF_CARD, check_folder, check_out, check_repository, check_writable
from hf_specx.hub.known_pairs import EMBEDDED, is_embedded

from .console import imports, say, waiting_for
from .options import AT, Overwrite, Trust, check_name, command


HELP_NAME = f"Id ({AT}) or folder of a pair; {EMBEDDED} is that in the package."
HELP_REPOSITORY = "Repository, owner/name, perhaps with @ and a branch; what is not there is made."
HELP_CARD_OUT = "Write it to this file; without a name, that of the pair in the package to this folder."
HELP_PRIVATE = "Make the repository private; one that is there has to be so already."
HELP_INSIDE = "Upload the weights also of models that the pair names by id."


@command
def card(
    name: Annotated[str | None, typer.Argument(help=HELP_NAME)] = None,
    repo_id: Annotated[str | None, typer.Argument(help="The id that a folder is to have on the Hub.")] = None,
    out: Annotated[Path | None, typer.Option(help=HELP_CARD_OUT)] = None,
) -> None:
    """Render a pair's model card from its config: facts that were checked, figures that were measured.

    Without a name, print the name of the pair in the package.
    """
    if name is None and out is None:
        typer.echo(EMBEDDED)
    elif name is None:
        assert out is not None
        check_writable(out.absolute(), out)
        with imports():
            from hf_specx.hub.cards import write_embedded_card
        say(str(write_embedded_card(out)))
    else:
        check_out(out, OF_CARD)
        check_pair_name(name, repo_id)
        with imports():
            from .loading import card_of
        text = card_of(name, repo_id)
        if out is None:
            typer.echo(text, nl=False)
        else:
            out.write_text(text, encoding="utf-8")


def check_pair_name(name: str, repo_id: str | None = None) -> None:
    """Raise ValueError if no pair can have this name, or for options that the pair in the package does not have."""
    check_name(name)
    first, revision = split_revision(name)
    if not is_embedded(first):
        return
    for value in (repo_id, revision):
        require(
            value is None,
            f"{first!r} is the pair in the package, which has one card and one version; leave {value} out.",
        )


@command
def publish(
    pair: Annotated[str, typer.Argument(help=HELP_NAME)],
    repo_id: Annotated[str | None, typer.Argument(help=HELP_REPOSITORY)] = None,
    out: Annotated[Path | None, typer.Option(help="Write the repository to this folder; upload nothing.")] = None,
    private: Annotated[bool, typer.Option("--private", help=HELP_PRIVATE)] = False,
    inside: Annotated[bool, typer.Option("--inside", help=HELP_INSIDE)] = False,
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Publish a pair as a model repository that works without this package installed.

    It gets the models, or their ids and commits, the model card, and the code in custom_generate/. Of an earlier pair
    there nothing is left: weights, json, txt, py and the like at the root, in draft/ and custom_generate/ are deleted.
    A README.md that is not a pair's stays.
    """
    repository, branch = (None, None) if repo_id is None else split_revision(repo_id)
    require(
        (repository is None) != (out is None),
        "give either the repository's name, or --out FOLDER to write one without uploading it.",
    )
    require(out is not None or not overwrite, "--overwrite goes with --out, which was not given; leave it out.")
    require(
        repository is not None or not private, "--private goes with a repository, which was not given; leave it out."
    )
    if repository is not None:
        check_repository(repository)
    if out is not None:
        check_folder(out, overwrite, "--overwrite")
    check_name(pair)
    with imports():
        from hf_specx.hub.publish import upload, write_folder

        from .loading import pair_to_publish
    with waiting_for(f"publishing {pair}"):
        write, models = pair_to_publish(pair, inside, trust_remote_code)
        if out is not None:
            write_folder(write, out, overwrite, with_code=True)
            outcome = f"written to {out}"
        else:
            commit = upload(write, str(repository), private or None, revision=branch)
            outcome = f"published {repository} at {commit}"
    say(f"{outcome}: {models}")


@command
def vllm(pair: Annotated[str, typer.Argument(help=HELP_NAME)]) -> None:
    """Print the vllm serve command of a pair with its --speculative-config, and what is different there."""
    check_pair_name(pair)
    with imports():
        from hf_specx.hub.vllm import vllm as export_vllm

        from .loading import config_of
    name, revision = split_revision(pair)
    typer.echo(str(export_vllm(config_of(pair), name, revision=revision)))
