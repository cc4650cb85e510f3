"""Pairs on the Hub, against a real server: pushed, found, run with and without the package, pinned, private."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hub_client import (
    DRAFT_WEIGHTS,
    FORMS,
    MODELS,
    NAME,
    OURS,
    Client,
    Failed,
    a_pair,
    by_function,
    by_package,
    by_string,
    expected,
    push,
    said,
)
from hub_server import OWNER, Hub
from packaging import version
from tiny import near
from transformers import AutoModelForCausalLM


Clients = Callable[..., Client]
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors")


def has_package() -> bool:
    """Whether it can be imported."""
    try:
        import hf_specx
    except ImportError:
        return False
    return hf_specx.__name__ in sys.modules


def asked(hub: Hub, method: str, part: str) -> int:
    """How many requests there were for paths with a part; with any method if none is given."""
    return sum(method in ("", seen.method) and part in seen.path for seen in hub.requests)


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


def test_first_load(pushed: Hub, client: Clients, capsys: pytest.CaptureFixture[str]):
    """With an empty cache, a request or two for each room and each file of the models; printed with its time."""
    import hf_specx  # not above: clients without the package import this file

    user = client(package=False)
    pushed.requests.clear()
    started = time.perf_counter()
    assert user(by_string, NAME) == expected()
    seconds, code = time.perf_counter() - started, asked(pushed, "", "/custom_generate/")
    with capsys.disabled():
        print(f"\nfirst load by string: {len(pushed.requests)} requests, {code} for code, {seconds:.1f} s")
    assert code <= 2 * len(list(Path(hf_specx.__file__).parent.glob("*/__init__.py")))
    assert len(pushed.requests) <= code + 24


def by_override_untrusted(name: str) -> bool:
    """Whether the model has a `generate` of its own."""
    return "generate" in vars(AutoModelForCausalLM.from_pretrained(name))


def modules_of_repositories() -> list[str]:
    return [name for name in sys.modules if name.startswith("transformers_modules.")]


def test_nothing_runs_without_trust(pushed: Hub, client: Clients):
    """Not a line of the repository's code is asked for, let alone run; `input` has nobody to answer."""
    user = client(package=False)
    with pytest.raises(Failed, match="trust_remote_code=True"):
        user(by_string, NAME, trust_remote_code=None)
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


def test_ways_to_ask_nothing_by_string(pushed: Hub, client: Clients):
    user = client(package=False)
    assert user(loaded_once, NAME) == expected()
    pushed.requests.clear()
    assert user(loaded_once, NAME) == expected()
    assert user(by_string, NAME, local_files_only=True) == expected()
    assert pushed.requests == []


@pytest.mark.parametrize("form", [*FORMS, by_function])
def test_a_revision_is_kept_to(hub: Hub, client: Clients, form: Callable[..., Any]):
    """The first commit has the first draft, though the repository has another by now."""
    publisher = client("publisher")
    first = publisher(push, NAME)
    publisher(push, NAME, 2)
    assert expected(1) != expected(2)
    assert client("now")(form, NAME) == expected(2)
    assert client("then")(form, NAME, revision=first) == expected(1)


def logged_in(form: Callable[..., Any], name: str) -> list[list[int]]:
    os.environ["HF_TOKEN"] = OWNER
    return form(name)


def test_a_push_to_a_branch(hub: Hub, client: Clients):
    """The branch is made, and main stays what it was."""
    publisher = client("publisher")
    publisher(push, NAME)
    publisher(push, NAME, 2, revision="new/draft")
    assert client("main")(by_package, NAME) == expected(1)
    assert client("branch")(by_package, NAME, revision="new/draft") == expected(2)


@pytest.mark.parametrize("form", [*FORMS, by_function])
def test_a_private_pair_wants_a_token(hub: Hub, client: Clients, form: Callable[..., Any]):
    client("publisher")(push, NAME, private=True)
    user, other = client("user"), client("other")
    with pytest.raises(Failed, match="RepositoryNotFoundError|not a valid model identifier"):
        user(form, NAME, token=None)
    assert user(form, NAME, token=OWNER) == expected()
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
    recommended = pair.config.num_draft_tokens
    pair = DraftTargetPair.from_pretrained("whole", **models)
    assert pair.config.num_draft_tokens == (recommended if loaded_here else "auto")  # of models that may be any
    pair.config.num_draft_tokens = recommended
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


def by_function_anew(name: str) -> list[list[int]]:
    """By another object of the same repository, loaded when this is called first."""
    from hf_specx import generate

    if "anew" not in MODELS:
        MODELS["anew"] = AutoModelForCausalLM.from_pretrained(name)
    return said(generate, MODELS["anew"], model=MODELS["anew"])


def test_a_target_keeps_the_draft_that_it_was_loaded_with(hub: Hub, client: Clients):
    """Though the repository has another by now, which another object of it has found; nothing more is asked."""
    publisher, user = client("publisher"), client()
    publisher(push, NAME)
    assert user(by_function, NAME) == expected(1)
    publisher(push, NAME, 2)
    assert user(by_function_anew, NAME) == expected(2)
    hub.requests.clear()
    assert user(by_function, NAME) == expected(1)
    assert user(by_function_anew, NAME) == expected(2)
    assert hub.requests == []


def revision_by_reference(name: str, revision: str) -> str | None:
    """What is noted of a model that transformers itself loaded, after it had loaded the newest."""
    from hf_specx import DraftTargetPair
    from hf_specx.pair_files.pair_config import PairConfig

    AutoModelForCausalLM.from_pretrained(name)
    target = AutoModelForCausalLM.from_pretrained(name, revision=revision)
    DraftTargetPair(target, near(target, 0.1)).save_pretrained("pair", target="reference")
    return PairConfig.from_file("pair/specx_config.json").target.revision


def test_no_commit_is_guessed(hub: Hub, client: Clients):
    """The cache has two, and transformers does not say from which one a model is; up to 5.22, it did."""
    publisher = client("publisher")
    first = publisher(push, NAME)
    publisher(push, NAME, 2)
    if version.parse(transformers.__version__) < version.parse("5.23"):
        assert client()(revision_by_reference, NAME, first) == first
        return
    with pytest.raises(
        Failed, match="loaded from 'org/pair', which is no repository on the Hub or not known at which"
    ):
        client()(revision_by_reference, NAME, first)


def push_with_a_template(name: str) -> None:
    pair = a_pair()
    pair.tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    pair.push_to_hub(name, token=OWNER)
    pair.target.push_to_hub("org/target", token=OWNER)
    pair.save_pretrained("whole")


def push_again(name: str, target: str) -> None:
    """What was saved above, without its template or without its tokenizer."""
    from hf_specx import DraftTargetPair

    pair = DraftTargetPair.from_pretrained("whole", target="org/target")
    pair.tokenizer.chat_template = None
    if target == "reference":
        pair.tokenizer = None
    pair.push_to_hub(name, token=OWNER, target=target)


USERS = {"LICENSE": b"ours", "docs/notes.json": b"{}", "images/a.png": b"", "docs/model.safetensors": b""}
LEFT = {"pytorch_model.bin": b"", "draft/pytorch_model.bin": b"", "model-00001-of-00002.safetensors": b""}


@pytest.mark.parametrize("target", ["reference", "inside"])
def test_a_push_leaves_nothing_of_an_earlier_pair(hub: Hub, client: Clients, target: str):
    """And what is not of a pair stays."""
    publisher = client("publisher")
    publisher(push_with_a_template, NAME)
    assert {"chat_template.jinja", "additional_chat_templates/tools.jinja"} <= hub.files(NAME).keys()
    hub.put(NAME, USERS | LEFT)
    publisher(push_again, NAME, target)
    kept = {"README.md", "specx_config.json", *(f"draft/{name}" for name in MODEL_FILES)}
    if target == "inside":
        kept |= {*MODEL_FILES, "tokenizer.json", "tokenizer_config.json"}
    assert {path for path in hub.files(NAME) if not path.startswith("custom_generate/")} == kept | USERS.keys()
    assert {path: hub.files(NAME)[path] for path in USERS} == USERS
    assert client(package=False)(by_string_with_the_target, NAME) == expected()


def test_a_repository_of_something_else_is_left_alone(hub: Hub, client: Clients):
    """Unless a pair would replace none of its files."""
    publisher, files = client("publisher"), {"train.py": b"mine", "pytorch_model.bin": b"", "README.md": b"mine"}
    hub.put(NAME, files)
    with pytest.raises(Failed, match="org/pair is no pair, and has .'pytorch_model.bin', 'train.py'., which a pair"):
        publisher(push, NAME)
    assert hub.files(NAME) == files
    hub.put("org/code", {"custom_generate/generate.py": b"mine"})
    with pytest.raises(Failed, match="org/code is no pair, and has .'custom_generate/generate.py'., which a pair"):
        publisher(push, "org/code")
    hub.put("org/card", {"README.md": b"mine"})
    publisher(push, "org/card")


def test_pairs_of_one_name_are_two(hub: Hub, client: Clients):
    """In one process, of two owners; by string, since there modules of code are shared by name."""
    publisher, user = client("publisher"), client(package=False)
    names = {NAME: 1, "owner/pair": 2}
    for name, draft in names.items():
        publisher(push, name, draft)
    for _ in range(2):
        for name, draft in names.items():
            assert user(by_string, name) == expected(draft)


def templates(name: str) -> list[str]:
    from hf_specx import DraftTargetPair

    return sorted(DraftTargetPair.from_pretrained(name).tokenizer.chat_template)


def test_a_tokenizer_has_all_its_templates(pushed: Hub, client: Clients):
    """They are in a folder of their own."""
    pushed.put(NAME, {"chat_template.jinja": b"one", "additional_chat_templates/other.jinja": b"two"})
    assert client()(templates, NAME) == ["default", "other"]
