"""`specx card`, `specx publish` and `specx export`: commands for a pair that exists."""

from pathlib import Path
from typing import Annotated

import typer

from hf_specx.common.drafts import split_revision
from hf_specx.common.errors import require
from hf_specx.hub.folders import PAIR_CARD_MARKER, check_folder, check_out, check_repository, check_writable
from hf_specx.hub.known_pairs import EMBEDDED, is_embedded

from .console import imports, say, waiting_for
from .options import PERHAPS_AT, Overwrite, Trust, check_name, command


HELP_NAME = f"Id ({PERHAPS_AT}) or folder of a pair; {EMBEDDED} is the pair in the package."
HELP_REPOSITORY = "Repository, owner/name, perhaps with @ and a branch; what is not there is made."
HELP_CARD_ID = "Id that a pair in a folder will have on the Hub, by which the card loads it; else the folder's name."
HELP_CARD_OUT = "File that the card is written to; else it is printed."
HELP_PUBLISH_OUT = "Folder that the repository is written to; nothing is uploaded then."
HELP_PRIVATE = "Make the repository private; one that is there has to be so already."
HELP_INSIDE = "Also copy the weights of models that the pair names by id."
HELP_CODE = "Publish code without models, which serves any two: publish --code REPO, or --code --out FOLDER."
HELP_CODE_ONLY = (
    "Renew the code that PAIR, a published one, or a repository of code carries; nothing else of it changes."
)


@command
def card(
    name: Annotated[str | None, typer.Argument(help=HELP_NAME)] = None,
    repo_id: Annotated[str | None, typer.Argument(help=HELP_CARD_ID)] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help=HELP_CARD_OUT)] = None,
) -> None:
    """Print the model card of a pair, or write it to a file: facts that were checked, figures that were measured.

    Without a name, print the name of the pair in the package.
    """
    if name is None:
        require(
            out is None, f"--out {out} is the file of one card; name the pair, as in specx card embedded --out FILE."
        )
        typer.echo(EMBEDDED)
    else:
        check_out(out, PAIR_CARD_MARKER)
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
    pair: Annotated[str | None, typer.Argument(help=HELP_NAME, show_default=False)] = None,
    repo_id: Annotated[str | None, typer.Argument(help=HELP_REPOSITORY)] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help=HELP_PUBLISH_OUT)] = None,
    code: Annotated[bool, typer.Option("--code", help=HELP_CODE)] = False,
    code_only: Annotated[bool, typer.Option("--code-only", help=HELP_CODE_ONLY)] = False,
    private: Annotated[bool, typer.Option("--private", help=HELP_PRIVATE)] = False,
    inside: Annotated[bool, typer.Option("--inside", help=HELP_INSIDE)] = False,
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Publish a pair as a model repository that works without this package installed.

    It gets the models, or their ids and commits, the model card, and the code in custom_generate/. An earlier pair in
    the repository is replaced: weights, json, txt, py and the like at its root, in draft/ and custom_generate/ are
    deleted. A README.md that is not the card of a pair stays.
    """
    if code or code_only:
        require(
            not (code and code_only),
            "--code publishes new code, and --code-only renews what is there; give one of them.",
        )
        options = {"--inside": inside, "--trust-remote-code": trust_remote_code, "--overwrite": overwrite}
        unused = [name for name, value in options.items() if value]
        require(not unused, f"{''.join(unused[:1])} is for the models of a pair, and code has none; leave it out.")
        if code:
            publish_code_of(pair, repo_id, out, private)
        else:
            renew_code_of(pair, repo_id or out or ("--private" if private else None))
        return
    if pair is None:
        raise ValueError("name a pair, as in specx publish my-pair org/name; or see --code, which needs none.")
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
        from hf_specx.hub.flatten import code_version
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
    say(f"{outcome} with the code of hf_specx {code_version()}: {models}")


def publish_code_of(repo_id: str | None, more: str | None, out: Path | None, private: bool) -> None:
    """Publish code without models to a repository, or write it into a folder; `more` is a second argument."""
    require(more is None, f"--code takes one repository, and no pair; leave {more} out.")
    require(
        (repo_id is None) != (out is None),
        "give either the repository's name, as in specx publish --code org/name, or --code --out FOLDER.",
    )
    require(out is None or not private, "--private goes with a repository, which was not given; leave it out.")
    repository, branch = (None, None) if repo_id is None else split_revision(repo_id)
    if repository is not None:
        check_repository(repository)
    if out is not None:
        check_writable(out.absolute().parent, out)
    with imports():
        from hf_specx.hub.flatten import code_version
        from hf_specx.hub.publish_code import publish_code, write_code_repository
    if out is not None:
        write_code_repository(out)
        say(f"written to {out}: code of hf_specx {code_version()}")
    else:
        with waiting_for(f"publishing {repository}"):
            commit = publish_code(str(repository), private=private or None, revision=branch)
        say(f"published {repository} at {commit}: code of hf_specx {code_version()}")


def renew_code_of(pair: str | None, more: object) -> None:
    """Renew the code of a pair, and say which version was there; `more` is what else was typed."""
    require(more is None, f"--code-only takes the published pair, and nothing else; leave {more} out.")
    if pair is None:
        raise ValueError("name the published pair, as in specx publish --code-only org/name, or its folder.")
    check_name(pair)
    with imports():
        from hf_specx.hub.flatten import code_version
        from hf_specx.hub.publish_code import renew_code
    with waiting_for(f"renewing the code of {pair}"):
        earlier, commit = renew_code(pair)
    where = f"{pair} at {commit}" if commit else pair
    say(f"{where} now has the code of hf_specx {code_version()}, in place of {earlier or 'an earlier version'}")


@command
def vllm(pair: Annotated[str, typer.Argument(help=HELP_NAME)]) -> None:
    """Print the command by which vLLM serves a pair, with comments on what is different there; it was not run."""
    check_pair_name(pair)
    with imports():
        from hf_specx.hub.vllm import vllm as export_vllm

        from .loading import config_of
    name, revision = split_revision(pair)
    typer.echo(str(export_vllm(config_of(pair), name, revision=revision)))
