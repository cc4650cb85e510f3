"""Patches: put in their place once, they do what a context has put over, or else what was there."""

import asyncio
import copy
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_specx.common import patching
from hf_specx.common.patching import LOCK, OVERRIDES, Overriding, beneath, patch_attribute, patch_function


class Table(torch.nn.Module):
    """With an attribute of each kind that is patched."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = (1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x + self.limit[0]


class Below(Table):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 10 * super().forward(x)


@pytest.fixture
def place() -> dict[str, Any]:
    return {"there": min}


@pytest.fixture(autouse=True)
def classes_as_they_were() -> Iterator[None]:
    forwards = {cls: vars(cls)["forward"] for cls in (Table, Below)}
    yield
    for cls, forward in forwards.items():
        cls.forward = forward
    if "limit" in vars(Table):
        del Table.limit


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A copy of this file under another name, as each published pair has one."""
    spec = importlib.util.spec_from_file_location("pair.common", patching.__file__)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def in_another_thread(job: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(job).result()


def test_each_thread_finds_its_own(place: dict[str, Any]):
    def look() -> int:
        return place["there"]([3, 5])

    def own() -> int:
        with Overriding({patch_function(place, "there"): len}):
            return look()

    with Overriding({patch_function(place, "there"): sum}):
        assert (in_another_thread(look), in_another_thread(own), look()) == (3, 2, 8)
        assert own() == 2
        assert look() == 8
    assert look() == 3


def test_each_task_finds_its_own(place: dict[str, Any]):
    async def call(function: Callable, others: asyncio.Barrier) -> int:
        with Overriding({patch_function(place, "there"): function}):
            await others.wait()
            return place["there"]([3, 5])

    async def run() -> list[int]:
        others = asyncio.Barrier(3)
        return await asyncio.gather(*(call(function, others) for function in (len, sum, max)))

    assert asyncio.run(run()) == [2, 8, 5]
    assert not OVERRIDES.get()


def test_a_place_is_patched_once(place: dict[str, Any]):
    table, below = Table(), Below()
    with ThreadPoolExecutor(8) as pool:
        functions = set(pool.map(lambda _: patch_function(place, "there"), range(200)))
        attributes = set(pool.map(lambda _: patch_attribute(table, "limit"), range(200)))
    assert functions == {place["there"]}
    assert len(attributes) == 1
    assert patch_attribute(below, "limit")[0] is vars(Table)["limit"]
    assert beneath(place["there"]) == [place["there"], min]


def test_an_error_ends_it(place: dict[str, Any]):
    with pytest.raises(KeyboardInterrupt), Overriding({patch_function(place, "there"): sum}):
        raise KeyboardInterrupt
    assert place["there"]([3, 5]) == 3
    assert not OVERRIDES.get()


def test_what_others_put_there_later(place: dict[str, Any]):
    """Another function in the place is what we patch next; a function around the patch goes on to it."""
    key, patch = patch_function(place, "there"), place["there"]
    place["there"] = lambda x: patch(x) + 100
    with Overriding({key: sum}):
        assert place["there"]([3, 5]) == 108
    with Overriding({patch_function(place, "there"): sum}):
        assert place["there"]([3, 5]) == 8
    assert place["there"]([3, 5]) == 103


def test_attributes_of_one_module():
    """What it has itself comes before what its class has, and ours before both; other modules meet nothing of it."""
    one, same, x = Table(), Table(), torch.ones(1)
    forward = Table.forward
    overrides = {patch_attribute(one, "limit"): (7, 8), patch_attribute(one, "forward"): lambda x: one.limit[0] * x}
    with Overriding(overrides):
        assert (one(x), one.limit) == (7, (7, 8))
        assert (same(x), same.limit) == (3, (1, 2))
        assert in_another_thread(lambda: (one(x), one.limit)) == (3, (1, 2))
        one.limit = (5, 6)
    assert (one(x), one.limit) == (7, (5, 6))
    assert Table.forward is forward
    assert not hasattr(Table, "limit")
    del one.limit
    assert not hasattr(one, "limit")
    with pytest.raises(AttributeError, match="limit"):
        del one.limit


@pytest.mark.parametrize("patched_first", [True, False])
def test_a_forward_that_a_module_has_itself(patched_first: bool):
    """As accelerate puts it there, of a class that calls its base's; it is called, and in its place ours."""
    below, x = Below(), torch.ones(1)
    patch_attribute(Table(), "forward")
    if patched_first:
        patch_attribute(below, "forward")
    plain = below.forward
    below.forward = lambda x: plain(x) + 1
    key = patch_attribute(below, "forward")
    usual = below.forward
    assert below(x) == 31
    with Overriding({key: lambda x: -usual(x)}):
        assert below(x) == -31
    below.forward = plain
    assert below(x) == 30


def test_modules_are_left_as_they_were_found():
    table = Table()
    before = dict(vars(table))
    with Overriding({patch_attribute(table, "forward"): torch.neg, patch_attribute(table, "limit"): (7, 8)}):
        assert vars(table) == before
        for other in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
            assert other(torch.ones(1)) == 3
            assert vars(other).keys() == before.keys()


def test_two_copies(place: dict[str, Any], other: ModuleType):
    """Each works alone and inside the other, whichever came first, and neither patches a place again and again."""
    table, x = Table(), torch.ones(1)
    assert other.LOCK is LOCK
    for _ in range(3):
        for copy_of_it in (patching, other):
            function = copy_of_it.patch_function(place, "there")
            forward, limit = (copy_of_it.patch_attribute(table, name) for name in ("forward", "limit"))
            assert (place["there"]([3, 5]), table(x), table.limit) == (3, 3, (1, 2))
            with copy_of_it.Overriding({function: sum, limit: (7, 8)}):
                assert (place["there"]([3, 5]), table(x)) == (8, 9)
                assert in_another_thread(lambda: (place["there"]([3, 5]), table(x))) == (3, 3)
                with (other if copy_of_it is patching else patching).Overriding({}):
                    assert (place["there"]([3, 5]), table(x)) == (8, 9)
            with copy_of_it.Overriding({forward: torch.neg}):
                assert table(x) == -1
            table.forward = lambda x: 5 * x
            assert table(x) == 5
            del table.forward
    assert len(beneath(place["there"])) == len(beneath(vars(Table)["forward"])) == 3


def test_compiled_code_takes_up_nothing_but_what_may_be_traced(place: dict[str, Any], other: ModuleType):
    """Without a break of the graph; what was compiled inside serves plain calls, which find what was there."""
    place["there"], table, x = torch.neg, Table(), torch.ones(1)
    function = patch_function(place, "there", torch.abs)
    keys = {function, patch_attribute(table, "limit"), patch_attribute(table, "forward")}
    for copy_of_it in (patching, other):
        copy_of_it.patch_function(place, "there")
        copy_of_it.patch_attribute(table, "limit")

        def call(x: torch.Tensor) -> torch.Tensor:
            return place["there"](table(x))

        def compiled(overrides: dict) -> torch.Tensor:
            torch._dynamo.reset()
            with Overriding(overrides):
                return torch.compile(call, backend="eager", fullgraph=True)(x)

        assert compiled({}) == compiled(dict.fromkeys(keys, torch.exp)) == -3
        assert compiled({function: torch.abs}) == 3
