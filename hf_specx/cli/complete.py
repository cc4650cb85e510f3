"""`specx generate --out`: many prompts to a file, which the same command goes on with after an interruption."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_specx.bench.store import provenance

from .console import Output
from .loading import texts_of
from .prompts import FilePrompts, Prompts


if TYPE_CHECKING:
    from .session import Session


class PromptTexts:
    """Prompts as texts, one by one; see `texts_of` for the arguments."""

    def __init__(self, prompts: Prompts | FilePrompts, session: "Session", chat: bool):
        self.prompts, self.session, self.chat = prompts, session, chat

    def __iter__(self) -> Iterator[str]:
        for prompt in self.prompts:
            yield from texts_of([prompt], self.session.pair.tokenizer, self.chat, self.session.name)

    def __len__(self) -> int:
        return len(self.prompts)


def write_texts(
    session: "Session", prompts: Prompts | FilePrompts, chat: bool, out: Path, batch_size: int
) -> dict[str, Any]:
    """Complete prompts to a file, and say so.

    Returns:
        The document of --json.
    """
    console, texts = Output(stderr=True), PromptTexts(prompts, session, chat)
    options = {"batch_size": batch_size, "seed": session.seed} | session.arguments
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        session.pair.complete(texts, out=out, **options)
    for warning in said:
        console.print(f"warning: {warning.message}", style="yellow", soft_wrap=True, markup=False)
    session.console.print(f"{len(texts)} texts are in {out}", soft_wrap=True, markup=False)
    source = {"pair": session.name, "seed": session.seed, "options": session.options}
    return source | provenance(session.pair.target) | {"out": str(out), "prompts": len(texts)}
