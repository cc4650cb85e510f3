"""No tensor is made without a device, and none of floats without a dtype: both have defaults that users may set."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_specx.hub.flatten import PACKAGE


FILES = sorted(PACKAGE.rglob("*.py"))
MAKERS = {made.__name__ for made in torch.utils._device._device_constructors()} | {"Generator"}  # torch's own list
FLOATS = {"zeros", "ones", "empty", "full", "rand", "randn", "eye", "linspace", "logspace"}


def factory_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Calls of torch's factories, but for what modules hold: these are made where torch makes its own modules."""
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if name in ("nn.Parameter", "self.register_buffer"):
        return
    if isinstance(node, ast.Call) and name.startswith("torch.") and name.removeprefix("torch.") in MAKERS:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from factory_calls(child)


def lacking(source: str) -> list[str]:
    """The factory calls that leave something to torch's defaults."""
    found = []
    for call in factory_calls(ast.parse(source)):
        name, given = ast.unparse(call.func).removeprefix("torch."), {keyword.arg for keyword in call.keywords}
        placed = "device" in given or (name == "Generator" and call.args)
        typed = name not in FLOATS or "dtype" in given
        found += [] if placed and typed else [f"{call.lineno}: {ast.unparse(call)}"]
    return found


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(PACKAGE).as_posix() for path in FILES])
def test_each_tensor_is_made_for_a_device(path: Path):
    assert not lacking(path.read_text())


@pytest.mark.parametrize("call", ["torch.tensor([1])", "torch.Generator()", "f(torch.zeros(2, device='cpu'))"])
def test_what_is_left_to_a_default_is_seen(call: str):
    assert lacking(call)
