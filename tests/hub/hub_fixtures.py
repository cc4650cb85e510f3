"""Fixtures of tests that use a Hub on loopback: `pytest_plugins = ["hub_fixtures"]`."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hub_client import HOME, Client
from hub_pairs import NAME, push
from hub_server import Hub, running


LOADED = ["torch", "transformers.generation.utils", "transformers.models.auto.modeling_auto"]
LOADED += ["transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama"]


@pytest.fixture(scope="session")
def new_hub() -> Iterator[Hub]:
    """One for all tests of this process, since whoever its clients are forked from knows its address."""
    with running() as hub:
        multiprocessing.get_context("forkserver").set_forkserver_preload(LOADED)
        with mock.patch.dict(os.environ, hub.environment(HOME), clear=True):
            forkserver.ensure_running()
        yield hub


@pytest.fixture
def hub(new_hub: Hub) -> Hub:
    """An empty one."""
    new_hub.reset()
    return new_hub


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """Makes clients by the name of their folder."""
    clients: list[Client] = []

    def make(name: str = "client", package: bool = True) -> Client:
        clients.append(Client(tmp_path / name, package))
        return clients[-1]

    yield make
    for fault in hub.faults.values():
        fault.release.set()
    for one in clients:
        one.pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def published(new_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What is on the Hub once the pair was pushed."""
    new_hub.reset()
    publisher = Client(tmp_path_factory.mktemp("publisher"))
    publisher(push, NAME)
    publisher.pool.shutdown()
    return new_hub.repositories, new_hub.objects


@pytest.fixture
def pushed(hub: Hub, published: tuple[dict[str, Any], dict[str, bytes]]) -> Hub:
    """A Hub with the pair."""
    hub.repositories, hub.objects = map(dict, published)
    return hub
