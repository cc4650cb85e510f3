"""`specx card`, `specx publish` and `specx export`: commands for a pair that exists."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hf_specx.common.errors import require
from hf_specx.hub.cards import known_card, render, write_cards
from hf_specx.hub.flatten import ENTRY
from hf_specx.hub.known_pairs import BY_NAME, NAMES, embedded_folder, is_embedded, is_known
from hf_specx.hub.publish import CODE, write_repository
from hf_specx.hub.saving import INSIDE, REFERENCE, check_folder
from hf_specx.hub.vllm import vllm as export_vllm
from hf_specx.measure.checks import looking_for
from hf_specx.pair_files.fetch import get_files, get_pair
from hf_specx.pair_files.pair_config import ModelSource, PairConfig

from .console import errors_in_one_line
from .options import (
    AsJson,
    DraftKind,
    Overwrite,
    Revision,
    Token,
    Trust,
    check_name,
    hub_options,
    load_given_pair,
    saved_as,
    with_draft,
)


def card(
    name: Annotated[
        str | None, typer.Argument(help="Id or folder of a pair, or a well-known pair's name.", show_default=False)
    ] = None,
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
        if every is not None:
            require(
                all(given is None for given in (name, out, title, revision)),
                "--all writes the cards of all well-known pairs; leave out the name, --out, --title and --revision.",
            )
            for path in write_cards(every):
                typer.echo(path)
            return
        if name is None:
            alone = out is title is revision is None
            require(alone, "without a name there is no card; name a pair, or leave out --out, --title and --revision.")
            typer.echo("\n".join(NAMES))
            return
        text = card_of(name, title, hub_options(revision, token))
        if out is None:
            typer.echo(text, nl=False)
        else:
            out.write_text(text, encoding="utf-8")


def card_of(name: str, title: str | None, hub: dict[str, Any]) -> str:
    """The card of a pair; its title is its id, or for a folder `title`."""
    if is_known(name):
        check_known(name, title=title, revision=hub.get("revision"))
        return known_card(name)
    config, folder = config_of(name, hub), Path(name)
    return render(config, title or (folder.resolve().name if folder.is_dir() else name), has_code(name, hub))


def config_of(name: str, hub: dict[str, Any]) -> PairConfig:
    """A pair's config, from a local folder of that name, else of a well-known pair, else from the Hub."""
    check_name(name)
    if is_known(name):
        check_known(name, revision=hub.get("revision"))
        if not is_embedded(name):
            return BY_NAME[name].config()
    options = dict(hub)
    with looking_for(name):
        return get_pair(embedded_folder() if is_embedded(name) else name, options.pop("revision", None), **options)[1]


def has_code(name: str, hub: dict[str, Any]) -> bool:
    """Whether a pair's folder or repository has `custom_generate/`."""
    options = dict(hub)
    files = get_files(name, options.pop("revision", None), [f"{ENTRY}.py"], CODE, **options)
    return (files.root / CODE / f"{ENTRY}.py").is_file()


def check_known(name: str, **given: str | None) -> None:
    """Raise a ValueError for options that mean nothing for a well-known pair."""
    for option, value in given.items():
        told = f"--{option} {value} means nothing for {name!r}, which is known here; leave it out."
        require(value is None, told)


def publish(
    pair: Annotated[str, typer.Argument(help="Id or folder of a pair.")],
    repo_id: Annotated[
        str | None, typer.Argument(help="Repository on the Hub, owner/name; made if need be.", show_default=False)
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Write the repository here; upload nothing.")] = None,
    private: Annotated[bool, typer.Option("--private", help="If the repository is made, make it private.")] = False,
    branch: Annotated[str | None, typer.Option(help="The branch to publish to; made if need be.")] = None,
    overwrite: Overwrite = False,
    draft: DraftKind = None,
    reference_target: Annotated[
        bool | None, typer.Option("--reference-target/--inside-target", help="Its id, or its weights; else as it is.")
    ] = None,
    reference_draft: Annotated[
        bool | None, typer.Option("--reference-draft/--inside-draft", help="Its id, or its weights; else as it is.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag of PAIR on the Hub.")] = None,
    token: Token = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Publish a pair as a model repository that works without this package installed.

    It gets the models, or their ids and commits, the model card, and the code in custom_generate/.
    """
    with errors_in_one_line():
        one = (repo_id is None) != (folder is None)
        require(one, "give the repository's name, or --folder to write one without uploading it.")
        if folder is None:
            check_left_out("--folder", "--overwrite" if overwrite else None)
        else:
            check_left_out("a repository", "--private" if private else None, "--branch" if branch else None)
            check_folder(folder, overwrite)
        loaded = with_draft(load_given_pair(pair, "auto", **hub_options(revision, token, trust_remote_code)), draft)
        asked = {"target": reference_target, "draft": reference_draft}
        where: dict[str, Any] = {
            role: publish_as(getattr(loaded.config, role), reference) for role, reference in asked.items()
        }
        if repo_id is not None:
            commit = loaded.push_to_hub(repo_id, private=private or None, token=token, revision=branch, **where)
            done, said = {"repository": repo_id, "commit": commit}, f"published {repo_id} at {commit}"
        elif folder is not None:
            write_repository(loaded, folder, overwrite=overwrite, **where)
            done, said = {"folder": str(folder)}, f"written to {folder}"
        Console().print(Text(f"{said}: target {where['target']}, draft {where['draft']}"), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(done | where))


def check_left_out(goal: str, *given: str | None) -> None:
    """Raise a ValueError for options that are for another way to publish."""
    for option in given:
        require(option is None, f"{option} is for {goal}, which was not named; leave it out.")


def publish_as(source: ModelSource, reference: bool | None) -> str:
    """Whether to publish a model inside the pair or by reference; None is as the pair has it."""
    return saved_as(source, inside=False) if reference is None else REFERENCE if reference else INSIDE


def vllm(
    pair: Annotated[str, typer.Argument(help="Id or folder of a pair, or a well-known pair's name.")],
    num_draft_tokens: Annotated[int | None, typer.Option(help="Candidates per round; else the pair's.")] = None,
    revision: Revision = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Print the vllm serve command of a pair with its --speculative-config, and what is different there."""
    with errors_in_one_line():
        config = config_of(pair, hub_options(revision, token))
        found = export_vllm(config, pair, revision=revision, num_draft_tokens=num_draft_tokens)
    typer.echo(json.dumps(found.to_dict()) if as_json else str(found))
