"""`specx card`, `specx publish` and `specx export`: commands for a pair that exists."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specx.bench.checks import check_out
from hf_specx.common.errors import require
from hf_specx.hub.folders import check_folder, check_repository, check_writable
from hf_specx.hub.known_pairs import NAMES, is_known

from .console import errors_in_one_line, imports, lines_now_and_then
from .options import HELP_KINDS, AsJson, Overwrite, Revision, Token, Trust, check_name, check_saved_kind, hub_options


HELP_NAME = "Id or folder of a pair, or a well-known pair's name."
AS_IT_IS = "Its id, or its weights; else as it is."
HELP_SAVED = f"{'; '.join(HELP_KINDS[:2])}; else the pair's own."


def card(
    name: Annotated[str | None, typer.Argument(help=HELP_NAME)] = None,
    out: Annotated[Path | None, typer.Option(help="Write it to this file.", dir_okay=False)] = None,
    every: Annotated[Path | None, typer.Option("--all", help="Write all known cards to this folder.")] = None,
    title: Annotated[str | None, typer.Option(help="The id that a folder is to have on the Hub.")] = None,
    revision: Revision = None,
    token: Token = None,
) -> None:
    """Render a pair's model card from its config: facts that were checked, figures that were measured.

    Without a name, list the well-known pairs.
    """
    with errors_in_one_line():
        named_one = [given for given in (name, out, title, revision) if given is not None]
        if every is not None:
            told = "--all writes the cards of all well-known pairs; leave out the name, --out, --title and --revision."
            require(not named_one, told)
            check_writable(every.absolute(), every)
            with imports():
                from hf_specx.hub.cards import write_cards
            typer.echo("\n".join(map(str, write_cards(every))))
        elif name is None:
            told = "without a name there is no card; name a pair, or leave out --out, --title and --revision."
            require(not named_one, told)
            typer.echo("\n".join(NAMES))
        else:
            check_out(out)
            check_known(name, title=title, revision=revision)
            with imports():
                from .reading import card_of
            text = card_of(name, title, revision, **hub_options(None, token))
            if out is None:
                typer.echo(text, nl=False)
            else:
                out.write_text(text, encoding="utf-8")


def check_known(name: str, **given: str | None) -> None:
    """Raise a ValueError if no pair can have this name, and for options that mean nothing for a well-known one."""
    check_name(name)
    for option, value in given.items() if is_known(name) else ():
        told = f"--{option} {value} is for pairs of your own, and {name!r} is a well-known one; leave it out."
        require(value is None, told)


def publish(
    pair: Annotated[str, typer.Argument(help="Id or folder of a pair.")],
    repo_id: Annotated[str | None, typer.Argument(help="Repository, owner/name; made if need be.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Write the repository here; upload nothing.")] = None,
    private: Annotated[bool, typer.Option("--private", help="If the repository is made, make it private.")] = False,
    branch: Annotated[str | None, typer.Option(help="The branch to publish to; made if need be.")] = None,
    overwrite: Overwrite = False,
    draft: Annotated[str | None, typer.Option(help=HELP_SAVED)] = None,
    reference_target: Annotated[bool | None, typer.Option("--reference-target/--inside-target", help=AS_IT_IS)] = None,
    reference_draft: Annotated[bool | None, typer.Option("--reference-draft/--inside-draft", help=AS_IT_IS)] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag of PAIR on the Hub.")] = None,
    token: Token = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Publish a pair as a model repository that works without this package installed.

    It gets the models, or their ids and commits, the model card, and the code in custom_generate/. Of an earlier pair
    there nothing is left: weights, json, txt, py and the like at the root, in draft/ and custom_generate/ are deleted.
    """
    with errors_in_one_line():
        check_goal(repo_id, folder, private=private, branch=branch, overwrite=overwrite)
        check_name(pair)
        check_saved_kind(draft)
        with imports():
            from .loading import default_device_map, load_given_pair, with_draft
            from .reading import publish_pair
        with lines_now_and_then(lambda: f"publishing {pair}"):
            hub = hub_options(revision, token, trust_remote_code)
            given = with_draft(load_given_pair(pair, "auto", default_device_map(), **hub), draft)
            asked = {"target": reference_target, "draft": reference_draft}
            uploading = {"private": private or None, "token": token, "revision": branch}
            options: dict[str, Any] = {"overwrite": overwrite} if repo_id is None else uploading
            done, line = publish_pair(given, repo_id, folder, asked, **options)
        typer.echo(json.dumps(done) if as_json else line)


def check_goal(repo_id: str | None, folder: Path | None, **given: bool | str | None) -> None:
    """Raise a ValueError if nothing can be published there, or for options that are for another way to publish."""
    one = (repo_id is None) != (folder is None)
    require(one, "give the repository's name, or --folder to write one without uploading it.")
    others, goal = (("overwrite",), "--folder") if folder is None else (("private", "branch"), "a repository")
    for option in others:
        require(not given[option], f"--{option} goes with {goal}, which was not given; leave it out.")
    if repo_id is not None:
        check_repository(repo_id)
    if folder is not None:
        check_folder(folder, bool(given["overwrite"]))


def vllm(
    pair: Annotated[str, typer.Argument(help=HELP_NAME)],
    num_draft_tokens: Annotated[int | None, typer.Option(help="Candidates per round; else the pair's.")] = None,
    revision: Revision = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Print the vllm serve command of a pair with its --speculative-config, and what is different there."""
    with errors_in_one_line():
        check_known(pair, revision=revision)
        with imports():
            from hf_specx.hub.vllm import vllm as export_vllm

            from .reading import config_of
        config = config_of(pair, revision, **hub_options(None, token))
        found = export_vllm(config, pair, revision=revision, num_draft_tokens=num_draft_tokens)
        typer.echo(json.dumps(found._asdict()) if as_json else str(found))
