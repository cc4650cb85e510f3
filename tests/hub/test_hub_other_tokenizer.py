"""A pair whose draft has another tokenizer, on the Hub: every way to run it finds both tokenizers there.

By string and by the class of the target without the package.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hub_client import FORMS, MODELS, NAME, OURS, Client, by_function, by_package, said
from hub_server import OWNER, Hub


KINDS = ("byte-level", "byte-level, other merges")


def a_pair():
    from other_tokens import pair_of  # which clients without the package cannot import

    pair = pair_of(*KINDS)
    pair.strategy.num_draft_tokens = pair.config.num_draft_tokens = 3
    return pair


def push(name: str) -> str:
    return a_pair().push_to_hub(name, token=OWNER)


@cache
def expected() -> list[list[int]]:
    """What it says here, before it was pushed."""
    pair = a_pair()
    found = said(pair.generate, pair.target)
    assert pair.report.tokenizer_match["match"] == "tokens"
    return found


def matched(name: str) -> dict[str, Any]:
    """How the tokenizers of a pair were matched that has generated, and the overlap that its config says."""
    pair = MODELS[name]
    return pair.report.tokenizer_match | {"overlap": pair.config.draft_tokenizer.overlap}


@pytest.fixture
def published(hub: Hub, client: Callable[..., Client]) -> Hub:
    client("publisher")(push, NAME)
    return hub


def test_every_way_to_run_it(published: Hub, client: Callable[..., Client]):
    files = set(published.repositories[NAME].files("main"))
    assert {"tokenizer.json", "draft/tokenizer.json", "draft/tokenizer_config.json"} <= files
    for form in [*FORMS, by_function]:
        user = client(form.__name__, package=form in OURS)
        assert user(form, NAME) == expected()
        if form is by_package:
            match = user(matched, NAME)
    assert match["match"] == "tokens"
    assert 0.9 < match["overlap"] < 1
