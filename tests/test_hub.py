"""Pairs on the Hub, against a real server: pushed, found, run with and without the package, pinned, private."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hub_answers import OWNER
from hub_client import Client, Failed
from hub_pairs import (
    DRAFT_WEIGHTS,
    FORMS,
    MODELS,
    NAME,
    OURS,
    a_pair,
    by_function,
    by_package,
    by_string,
    expected,
    push,
    said,
)
from hub_server import Hub
from transformers import AutoModelForCausalLM


pytest_plugins = ["hub_fixtures"]

Clients = Callable[..., Client]


def has_package() -> bool:
    """Whether it can be imported."""
    try:
        import hf_specx
    except ImportError:
        return False
    return hf_specx.__name__ in sys.modules


def asked(hub: Hub, method: str, part: str) -> int:
    """How many requests there were for paths with a part."""
    return sum(seen.method == method and part in seen.path for seen in hub.requests)


@pytest.mark.parametrize("package", [True, False])
@pytest.mark.parametrize("form", [*FORMS, by_function])
def test_another_process_says_the_same(pushed: Hub, client: Clients, form: Callable[..., Any], package: bool):
    """With the code of the repository where the package is not called, and then without the package as well."""
    user = client(package=package)
    assert user(has_package) == package
    if form in OURS and not package:
        with pytest.raises(Failed, match="ModuleNotFoundError"):
            user(form, NAME)
        return
    assert user(form, NAME) == expected()
    assert asked(pushed, "GET", "custom_generate/generate.py") == (form not in OURS)


def by_string_untrusted(name: str, **options: Any) -> list[list[int]]:
    return by_string(name, trust_remote_code=None, **options)


def by_override_untrusted(name: str) -> bool:
    """Whether the model has a `generate` of its own."""
    return "generate" in vars(AutoModelForCausalLM.from_pretrained(name))


def modules_of_repositories() -> list[str]:
    return [name for name in sys.modules if name.startswith("transformers_modules.")]


def test_nothing_runs_without_trust(pushed: Hub, client: Clients):
    """Not a line of the repository's code is asked for, let alone run; `input` has nobody to answer."""
    user = client(package=False)
    with pytest.raises(Failed, match="trust_remote_code=True"):
        user(by_string_untrusted, NAME)
    assert not user(by_override_untrusted, NAME)
    assert user(modules_of_repositories) == []
    assert asked(pushed, "GET", ".py") == 0
    assert user(by_string, NAME) == expected()
    assert user(modules_of_repositories) != []


@pytest.mark.parametrize("form", [*FORMS, by_function])
def test_a_second_call_asks_nothing_of_ours(pushed: Hub, client: Clients, form: Callable[..., Any]):
    """By string, stock asks again for the code, file by file; the other forms ask nothing."""
    user = client()
    user(form, NAME)
    pushed.requests.clear()
    assert user(form, NAME) == expected()
    asked_again = [seen for seen in pushed.requests if "/custom_generate/" in seen.path]
    assert pushed.requests == asked_again
    assert bool(asked_again) == (form is by_string)


def loaded_once(name: str) -> list[list[int]]:
    """`load_custom_generate`, whose result takes the model first."""
    if name not in MODELS:
        MODELS[name] = AutoModelForCausalLM.from_pretrained(name)
        MODELS["code"] = MODELS[name].load_custom_generate(name, trust_remote_code=True)
    return said(lambda **inputs: MODELS["code"](model=MODELS[name], **inputs), MODELS[name])


def by_string_from_the_cache(name: str) -> list[list[int]]:
    return by_string(name, local_files_only=True)


def test_ways_to_ask_nothing_by_string(pushed: Hub, client: Clients):
    user = client(package=False)
    assert user(loaded_once, NAME) == expected()
    pushed.requests.clear()
    assert user(loaded_once, NAME) == expected()
    assert user(by_string_from_the_cache, NAME) == expected()
    assert pushed.requests == []


@pytest.mark.parametrize("form", [*FORMS, by_function])
def test_a_revision_is_kept_to(hub: Hub, client: Clients, form: Callable[..., Any]):
    """The first commit has the first draft, though the repository has another by now."""
    publisher = client("publisher")
    first = publisher(push, NAME)
    publisher(push, NAME, 2)
    assert expected(1) != expected(2)
    assert client("now")(form, NAME) == expected(2)
    assert client("then")(at_revision, form, NAME, first) == expected(1)


def at_revision(form: Callable[..., Any], name: str, revision: str) -> list[list[int]]:
    return form(name, revision=revision)


def with_token(form: Callable[..., Any], name: str, token: str | None) -> list[list[int]]:
    return form(name, token=token)


def logged_in(form: Callable[..., Any], name: str) -> list[list[int]]:
    os.environ["HF_TOKEN"] = OWNER
    return form(name)


@pytest.mark.parametrize("form", [*FORMS, by_function])
def test_a_private_pair_wants_a_token(hub: Hub, client: Clients, form: Callable[..., Any]):
    client("publisher")(push, NAME, 1, True)
    user, other = client("user"), client("other")
    with pytest.raises(Failed, match="RepositoryNotFoundError|not a valid model identifier"):
        user(with_token, form, NAME, None)
    assert user(with_token, form, NAME, OWNER) == expected()
    assert other(logged_in, form, NAME) == expected()


def push_by_reference(draft: str, loaded_here: bool) -> None:
    """The pair, from models in repositories of their own, that we or transformers itself have loaded."""
    from hf_specx import DraftTargetPair

    pair = a_pair()
    for name, model in {"org/target": pair.target, "org/draft": pair.draft}.items():
        model.push_to_hub(name, token=OWNER)
        pair.tokenizer.push_to_hub(name, token=OWNER)
    pair.save_pretrained("whole")
    models: dict[str, Any] = {role: f"org/{role}" for role in ("target", "draft")}
    if not loaded_here:
        models = {role: AutoModelForCausalLM.from_pretrained(name) for role, name in models.items()}
    pair = DraftTargetPair.from_pretrained("whole", **models)
    pair.push_to_hub(NAME, token=OWNER, target="reference", draft=draft)


def by_string_with_the_target(name: str) -> list[list[int]]:
    MODELS[name] = AutoModelForCausalLM.from_pretrained("org/target")
    return by_string(name)


@pytest.mark.parametrize(("draft", "loaded_here"), [("inside", True), ("reference", True), ("reference", False)])
def test_models_by_reference(hub: Hub, client: Clients, draft: str, loaded_here: bool):
    """At the commits that they had: what is pushed there later is not theirs."""
    client("publisher")(push_by_reference, draft, loaded_here)
    weights = [path for path in hub.files(NAME) if path.endswith(".safetensors")]
    assert weights == [DRAFT_WEIGHTS] * (draft == "inside")
    hub.put("org/draft", {"model.safetensors": b"no weights at all"})
    assert client("by package")(by_package, NAME) == expected()
    assert client("by string", package=False)(by_string_with_the_target, NAME) == expected()


def test_pairs_of_one_name_are_two(hub: Hub, client: Clients):
    """In one process, of two owners; by string, since there modules of code are shared by name."""
    publisher, user = client("publisher"), client(package=False)
    names = {NAME: 1, "owner/pair": 2}
    for name, draft in names.items():
        publisher(push, name, draft)
    for _ in range(2):
        for name, draft in names.items():
            assert user(by_string, name) == expected(draft)
