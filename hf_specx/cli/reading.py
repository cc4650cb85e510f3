"""What the commands for a pair that exists read and write: its config, its card, its repository."""

from pathlib import Path
from typing import Any

from hf_specx.bench.checks import looking_for
from hf_specx.hub.cards import known_card, render
from hf_specx.hub.fetch import get_files, get_pair
from hf_specx.hub.flatten import ENTRY
from hf_specx.hub.folders import INSIDE, REFERENCE
from hf_specx.hub.known_pairs import BY_NAME, embedded_folder, is_embedded, is_known
from hf_specx.hub.pair_config import PairConfig
from hf_specx.hub.publish import CODE, write_repository
from hf_specx.pairs.pair import DraftTargetPair

from .loading import saved_as


def card_of(name: str, title: str | None, revision: str | None, **hub: Any) -> str:
    """The card of a pair, whose examples load it by its id; of a folder by `title` or else from there."""
    if is_known(name):
        return known_card(name)
    config, folder = config_of(name, revision, **hub), Path(name)
    code = get_files(name, revision, [f"{ENTRY}.py"], CODE, **hub).root / CODE / f"{ENTRY}.py"
    if title is None and folder.is_dir():
        return render(config, str(folder.absolute()), code.is_file(), folder.resolve().name)
    return render(config, title or name, code.is_file())


def config_of(name: str, revision: str | None, **hub: Any) -> PairConfig:
    """A pair's config, from a local folder of that name, else of a well-known pair, else from the Hub."""
    if is_known(name) and not is_embedded(name):
        return BY_NAME[name].config()
    with looking_for(name):
        return get_pair(embedded_folder() if is_embedded(name) else name, revision, **hub)[1]


def publish_pair(
    pair: DraftTargetPair, repo_id: str | None, folder: Path | None, asked: dict[str, bool | None], **options: Any
) -> tuple[dict[str, str], str]:
    """Upload a pair, or write its repository into a folder.

    Args:
        pair: what is published.
        repo_id, folder: where; one of them is None.
        asked: by role ("target", "draft"), whether by reference; None is as the pair has it.
        **options: of the one that is done.

    Returns:
        What was done as plain values, and in a line.
    """
    where = {role: saved_as(getattr(pair.config, role), inside=False) for role in asked}
    where |= {role: REFERENCE if named else INSIDE for role, named in asked.items() if named is not None}
    if folder is None:
        assert repo_id is not None
        commit = pair.push_to_hub(repo_id, **options, **where)
        done, said = {"repository": repo_id, "commit": commit}, f"published {repo_id} at {commit}"
    else:
        write_repository(pair, folder, **options, **where)
        done, said = {"folder": str(folder)}, f"written to {folder}"
    return done | where, f"{said}: target {where['target']}, draft {where['draft']}"
