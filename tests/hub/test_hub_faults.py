"""Downloads of a pair that go wrong: tried again, or refused, and never is half a file used."""

import os
import signal
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest
from hub_client import DRAFT_WEIGHTS, NAME, Client, Failed, by_override, by_package, by_string, expected
from hub_server import Hub


Clients = Callable[..., Client]


@pytest.mark.parametrize(
    ("form", "path"),
    [
        (by_package, "model.safetensors"),
        (by_package, DRAFT_WEIGHTS),
        (by_string, DRAFT_WEIGHTS),
        (by_package, "specx_config.json"),
        (by_override, "custom_generate/generate.py"),
    ],
)
def test_an_interrupted_download_goes_on(pushed: Hub, client: Clients, form: Callable[..., Any], path: str):
    pushed.fail(path, "cut", after=100)
    assert client()(form, NAME) == expected()
    assert pushed.faults == {}


@pytest.mark.parametrize("form", [by_package, by_string])
def test_a_file_that_is_too_short_is_not_used(pushed: Hub, client: Clients, form: Callable[..., Any]):
    """The same process may try again."""
    user = client()
    pushed.fail(DRAFT_WEIGHTS, "short", after=100)
    with pytest.raises(Failed, match=f"Consistency check failed.*{DRAFT_WEIGHTS.split('/')[1]}"):
        user(form, NAME)
    assert user(form, NAME) == expected()


@pytest.mark.parametrize("form", [by_package, by_string])
def test_after_a_kill_a_second_process_is_clean(pushed: Hub, client: Clients, form: Callable[..., Any]):
    """In the same cache, where a part of the draft is left over."""
    stalled = pushed.fail(DRAFT_WEIGHTS, "stall", after=100)
    killed = client("same")
    process, call = killed(os.getpid), killed.start(form, NAME)
    assert stalled.reached.wait(60)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(BrokenProcessPool):
        call.result()
    assert list(killed.folder.rglob("*.incomplete"))
    assert client("same")(form, NAME) == expected()
