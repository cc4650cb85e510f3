"""`specx card`, `specx publish` and `specx export`: what is done with a pair once it is there."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .card_usage import EMBEDDED
from .cards import known_card, render, write_cards
from .cli_options import AsJson, Revision, Token, Trust, hub_options, load_pair
from .cli_tune import place
from .console import errors_in_one_line
from .export import vllm as export_vllm
from .fetch import get_pair
from .hub import write_repository
from .known_pairs import KNOWN_PAIRS
from .pair_config import ModelSource, PairConfig
from .saving import INSIDE, REFERENCE


def card(
    name: Annotated[
        str | None, typer.Argument(help="Id or folder of a pair, or a well-known pair's name.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write it to this file.", dir_okay=False)] = None,
    every: Annotated[Path | None, typer.Option("--all", help="Write all that are known to this folder.")] = None,
    title: Annotated[str | None, typer.Option(help="The id that a folder is to have on the Hub.")] = None,
    revision: Revision = None,
    token: Token = None,
) -> None:
    """Render a pair's model card from its config: facts that were checked, figures that were measured.

    Without a name, list the well-known pairs.
    """
    with errors_in_one_line():
        if every is not None:
            if name is not None or out is not None:
                raise ValueError("--all writes the cards of all well-known pairs; leave the name and --out away.")
            for path in write_cards(every):
                typer.echo(path)
            return
        if name is None:
            typer.echo("\n".join(known_names()))
            return
        text = card_of(name, title, hub_options(revision, token))
        if out is None:
            typer.echo(text, nl=False)
        else:
            out.write_text(text, encoding="utf-8")


def card_of(name: str, title: str | None, hub: dict[str, Any]) -> str:
    """The card of a pair, called by its id, or by `title` where it is a folder."""
    if name in known_names() and not Path(name).is_dir():
        return known_card(name)
    return render(config_of(name, hub), title or (Path(name).resolve().name if Path(name).is_dir() else name))


def config_of(name: str, hub: dict[str, Any]) -> PairConfig:
    """A pair's config: a local folder of that name comes first, then the pairs that are known here, then the Hub."""
    known = {} if Path(name).is_dir() else {pair.name: pair for pair in KNOWN_PAIRS}
    if name in known:
        return known[name].config()
    place: str | Path = name
    if name == EMBEDDED and not Path(name).is_dir():
        place = Path(str(files("hf_specx") / EMBEDDED))
    return get_pair(place, hub.pop("revision", None), **hub)[1]


def known_names() -> list[str]:
    """Pairs that need no folder and no repository."""
    return [EMBEDDED, *(pair.name for pair in KNOWN_PAIRS)]


def publish(
    pair: Annotated[str, typer.Argument(help="Id or folder of a pair.")],
    repo_id: Annotated[
        str | None, typer.Argument(help="Repository on the Hub, owner/name; made if need be.", show_default=False)
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Write the repository here; upload nothing.")] = None,
    private: Annotated[bool, typer.Option("--private", help="If the repository is made, make it private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch; made if need be.")] = None,
    reference_target: Annotated[
        bool | None, typer.Option("--reference-target/--inside-target", help="Its id, or its weights; else as it is.")
    ] = None,
    reference_draft: Annotated[
        bool | None, typer.Option("--reference-draft/--inside-draft", help="Its id, or its weights; else as it is.")
    ] = None,
    pair_revision: Annotated[str | None, typer.Option(help="Commit, branch or tag of PAIR on the Hub.")] = None,
    token: Token = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Publish a pair as a model repository that works with nothing of ours installed.

    It gets the models, or their ids and commits, the model card, and the code in custom_generate/.
    """
    with errors_in_one_line():
        if (repo_id is None) == (folder is None):
            raise ValueError("give the repository's name, or --folder to write one without uploading it.")
        loaded = load_pair(pair, "auto", **hub_options(pair_revision, token, trust_remote_code))
        asked = {"target": reference_target, "draft": reference_draft}
        where: dict[str, Any] = {
            role: place_of(getattr(loaded.config, role), reference) for role, reference in asked.items()
        }
        if repo_id is not None:
            commit = loaded.push_to_hub(repo_id, private=private or None, token=token, revision=revision, **where)
            done, said = {"repository": repo_id, "commit": commit}, f"published {repo_id} at {commit}"
        elif folder is not None:
            write_repository(loaded, folder, **where)
            done, said = {"folder": str(folder)}, f"written to {folder}"
        Console().print(Text(f"{said}: target {where['target']}, draft {where['draft']}"), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(done | where))


def place_of(source: ModelSource, reference: bool | None) -> str:
    """Whether to publish a model inside or by reference; None is as its pair has it."""
    return place(source, inside=False) if reference is None else REFERENCE if reference else INSIDE


def vllm(
    pair: Annotated[str, typer.Argument(help="Id or folder of a pair, or a well-known pair's name.")],
    num_draft_tokens: Annotated[int | None, typer.Option(help="Candidates a round; else the pair's.")] = None,
    revision: Revision = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Print the vllm serve command of a pair with its --speculative-config, and what is different there."""
    with errors_in_one_line():
        config = config_of(pair, hub_options(revision, token))
        found = export_vllm(config, pair, revision=revision, num_draft_tokens=num_draft_tokens)
    typer.echo(json.dumps(found.to_dict()) if as_json else str(found))
