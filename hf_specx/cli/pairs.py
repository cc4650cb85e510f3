"""`specx card`, `specx publish` and `specx export`: commands for a pair that exists."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specx.bench.ways import SUFFIX
from hf_specx.common.errors import require
from hf_specx.hub.folders import INSIDE, REFERENCE, check_folder, check_out, check_repository, check_writable
from hf_specx.hub.known_pairs import NAMES, is_known

from .console import imports, waiting_for
from .options import (
    DRAFTS,
    HELP_KINDS,
    AsJson,
    Loading,
    Overwrite,
    Source,
    TrustedSource,
    check_name,
    command,
    is_kind,
)


HELP_NAME = "Id or folder of a pair, or a well-known pair's name."
AS_IT_IS = "Its id, or its weights; else as it is."
HELP_SAVED = f"{'; '.join(HELP_KINDS[:2])}; else the pair's own."


@command
def card(
    source: Source,
    name: Annotated[str | None, typer.Argument(help=HELP_NAME)] = None,
    out: Annotated[Path | None, typer.Option(help="Write it to this file.", dir_okay=False)] = None,
    every: Annotated[Path | None, typer.Option("--all", help="Write all known cards to this folder.")] = None,
    title: Annotated[str | None, typer.Option(help="The id that a folder is to have on the Hub.")] = None,
) -> None:
    """Render a pair's model card from its config: facts that were checked, figures that were measured.

    Without a name, list the well-known pairs.
    """
    of_one = any(given is not None for given in (name, out, title, source.revision))
    if every is not None:
        require(not of_one, "--all writes all well-known cards; leave out the name, --out, --title and --revision.")
        check_writable(every.absolute(), every)
        with imports():
            from hf_specx.hub.cards import write_cards
        typer.echo("\n".join(map(str, write_cards(every))))
    elif name is None:
        told = "without a name there is no card; name a pair, or leave out --out, --title and --revision."
        require(not of_one, told)
        typer.echo("\n".join(NAMES))
    else:
        check_out(out)
        check_known(name, title=title, revision=source.revision)
        with imports():
            from .loading import card_of
        text = card_of(name, title, **{"revision": None, **source.hub})
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


@command
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
    as_json: AsJson = False,
    *,
    source: TrustedSource,
) -> None:
    """Publish a pair as a model repository that works without this package installed.

    It gets the models, or their ids and commits, the model card, and the code in custom_generate/. Of an earlier pair
    there nothing is left: weights, json, txt, py and the like at the root, in draft/ and custom_generate/ are deleted.
    """
    check_goal(repo_id, folder, private=private, branch=branch, overwrite=overwrite)
    check_name(pair)
    told = f"--draft {draft} is no kind of draft to save; choose {SUFFIX}, exit:4 or the like."
    require(draft is None or (is_kind(draft) and draft != DRAFTS[1]), told)
    with imports():
        from hf_specx.hub.publish import save

        from .loading import load_given_pair, saved_as, with_draft
    with waiting_for(f"publishing {pair}"):
        given = with_draft(load_given_pair(pair, Loading(**source.hub)), draft)
        where = {}
        for role, named in (("target", reference_target), ("draft", reference_draft)):
            as_it_is = saved_as(getattr(given.config, role), inside=False)
            where[role] = as_it_is if named is None else REFERENCE if named else INSIDE
        if folder is not None:
            save(given, folder, overwrite=overwrite, with_code=True, **where)
            done, said = {"folder": str(folder)}, f"written to {folder}"
        else:
            made: Any = {"private": private or None, "token": source.token, "revision": branch, **where}
            done = {"repository": str(repo_id), "commit": given.push_to_hub(str(repo_id), **made)}
            said = f"published {repo_id} at {done['commit']}"
    line = f"{said}: target {where['target']}, draft {where['draft']}"
    typer.echo(json.dumps(done | where) if as_json else line)


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


@command
def vllm(
    pair: Annotated[str, typer.Argument(help=HELP_NAME)],
    num_draft_tokens: Annotated[int | None, typer.Option(help="Candidates per round; else the pair's.")] = None,
    as_json: AsJson = False,
    *,
    source: Source,
) -> None:
    """Print the vllm serve command of a pair with its --speculative-config, and what is different there."""
    check_known(pair, revision=source.revision)
    with imports():
        from hf_specx.hub.vllm import vllm as export_vllm

        from .loading import config_of
    config = config_of(pair, **{"revision": None, **source.hub})
    found = export_vllm(config, pair, revision=source.revision, num_draft_tokens=num_draft_tokens)
    typer.echo(json.dumps(found._asdict()) if as_json else str(found))
