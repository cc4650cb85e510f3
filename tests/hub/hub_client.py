"""Processes that use the fake Hub, with fixtures that start them, and what they do there: push a pair, have it speak.

What is called in a client imports the package itself, since there are clients that have none.
"""

import copy
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hub_server import OWNER, Hub, Repository, running
from tiny import VOCAB_SIZE, Forwards, near, prompts, tiny
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast


HOME = "home"  # of every client below its own folder, since the cache's place is settled once where all are forked
LOADED = ["torch", "transformers.generation.utils", "transformers.models.auto.modeling_auto"]
LOADED += ["transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama"]
NAME, TOKENS = "org/pair", 20
SETTINGS = {"do_sample": True, "max_new_tokens": TOKENS, "top_k": 0}
DRAFT_WEIGHTS = "draft/model.safetensors"
MODELS: dict[str, Any] = {}  # of a client, from call to call


class Failed(Exception):
    """What went wrong in a client: "TheError: its message"."""


class NoPackage:
    """An importer for which the package is not installed."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name.partition(".")[0] == "hf_specx":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


class Client:
    """A process with a cache of its own, empty at first; it keeps what its modules hold from call to call.

    Args:
        folder: where the process is, and below which its cache is.
        package: whether `hf_specx` can be imported.
    """

    def __init__(self, folder: Path, package: bool = True):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        elsewhere = os.environ.get("HF_MODULES_CACHE")
        self.pool = ProcessPoolExecutor(1, context, _settle, (str(folder), package, elsewhere))

    def start(self, function: Callable[..., Any], *args: Any, **options: Any) -> "Future[Any]":
        """Have a module's function called; all that goes in and out is pickled."""
        return self.pool.submit(_call, function, args, options)

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a module's function and wait for its result.

        Raises:
            Failed: if it raised.
        """
        return self.start(function, *args, **options).result()


def _settle(folder: str, package: bool, elsewhere: str | None) -> None:
    """Begin a client; `elsewhere` is where the code of repositories lies that its parent has run."""
    os.chdir(folder)
    sys.path[:] = [place for place in sys.path if place != elsewhere]  # it was handed down
    if not package:
        sys.meta_path.insert(0, NoPackage())


def _call(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        return function(*args, **options)
    except Exception as error:  # not every exception can be pickled
        raise Failed(f"{type(error).__name__}: {error}") from error


def environment(hub: Hub) -> dict[str, str]:
    """What a process needs to take this for the Hub."""
    ours = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": HOME, "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    ours["TRANSFORMERS_VERBOSITY"] = "error"
    ours |= {f"HF_HUB_{name}_TIMEOUT": "60" for name in ("ETAG", "DOWNLOAD")}  # 10 are few on a busy machine
    ours |= {f"HF_HUB_DISABLE_{name}": "1" for name in ("XET", "TELEMETRY", "PROGRESS_BARS", "UPDATE_CHECK")}
    left = ("PATH", "LANG", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "SYSTEMROOT")
    return {name: os.environ[name] for name in left if name in os.environ} | ours


@pytest.fixture(scope="session")
def new_hub() -> Iterator[Hub]:
    """One for all tests of this process, since whoever its clients are forked from knows its address."""
    with running() as hub:
        forkserver._forkserver._stop()  # one of other tests does not know this Hub
        multiprocessing.get_context("forkserver").set_forkserver_preload(LOADED)
        with mock.patch.dict(os.environ, environment(hub), clear=True):
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
    for one in clients:
        one.pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def published(new_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repository]:
    """What is on the Hub once the pair was pushed."""
    new_hub.reset()
    publisher = Client(tmp_path_factory.mktemp("publisher"))
    publisher(push, NAME)
    publisher.pool.shutdown()
    return new_hub.repositories


@pytest.fixture
def pushed(hub: Hub, published: dict[str, Repository]) -> Hub:
    """A Hub with the pair."""
    hub.repositories = copy.deepcopy(published)
    return hub


def a_pair(draft: int = 1):
    """One of several pairs, which differ by their draft."""
    from hf_specx import DraftTargetPair
    from hf_specx.pair_files.pair_config import ModelSource, PairConfig

    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w1")), pad_token="w0")
    config = PairConfig(ModelSource(), ModelSource(subfolder="draft"), num_draft_tokens=3)
    return DraftTargetPair(tiny(), near(tiny(), 0.1, seed=draft), tokenizer, config)


def push(name: str, draft: int = 1, private: bool | None = None, **options: Any) -> str:
    return a_pair(draft).push_to_hub(name, token=OWNER, private=private, **options)


def said(generate: Callable[..., torch.Tensor], target: PreTrainedModel, **options: Any) -> list[list[int]]:
    """The tokens after the prompts, of a call that must have speculated."""
    torch.manual_seed(0)
    with Forwards(target) as forwards:
        output = generate(**prompts(2), **SETTINGS, **options)
    assert len(forwards.ids) < TOKENS
    return output[:, prompts(2)["input_ids"].shape[1] :].tolist()


@cache
def expected(draft: int = 1) -> list[list[int]]:
    """What the package says, here, of the pair as it was before it was pushed."""
    pair = a_pair(draft)
    return said(pair.generate, pair.target)


def by_package(name: str, **options: Any) -> list[list[int]]:
    from hf_specx import DraftTargetPair

    if name not in MODELS:
        MODELS[name] = DraftTargetPair.from_pretrained(name, **options)
    return said(MODELS[name].generate, MODELS[name].target)


def by_string(name: str, **options: Any) -> list[list[int]]:
    options = {"trust_remote_code": True, "custom_generate": name} | options
    if name not in MODELS:
        MODELS[name] = AutoModelForCausalLM.from_pretrained(name, token=options.get("token"))
    return said(MODELS[name].generate, MODELS[name], **options)


def by_override(name: str, **options: Any) -> list[list[int]]:
    """The first call loads the draft: a token is for that one as well."""
    first = {} if name in MODELS else {key: options[key] for key in options if key == "token"}
    if name not in MODELS:
        MODELS[name] = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, **options)
    return said(MODELS[name].generate, MODELS[name], **first)


def by_function(name: str, **options: Any) -> list[list[int]]:
    """The draft is found by where the target was loaded from."""
    from hf_specx import generate

    if name not in MODELS:
        MODELS[name] = AutoModelForCausalLM.from_pretrained(name, **options)
    return said(generate, MODELS[name], model=MODELS[name], **options)


FORMS = [by_package, by_string, by_override]
OURS = [by_package, by_function]
