"""Stands for the python of `scripts/gpu.sh`: what it is given runs on the emulated accelerator, with tiny models.

Of each test the first case runs. What captures graphs or needs Triton cannot run: the tests of compiled forwards are
skipped by themselves, and methods whose forwards we compile are refused.
"""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerator import emulated


ROOT = Path(__file__).parents[2]


class FirstCases:
    """A plugin that leaves the first case of each test."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        first: dict[str, pytest.Item] = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        items[:] = first.values()


def bench(arguments: list[str]) -> None:
    """`scripts/grafted.py` with tiny recipes, and few tokens."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import grafted

    small = {"hidden": 32, "inner": 64, "layers": 3, "draft_layers": 1, "heads": 2, "kv_heads": 1, "vocab": 128}
    for name, recipe in grafted.RECIPES.items():
        grafted.RECIPES[name] = replace(recipe, **small, epsilon=0.1)
    sys.argv = [*arguments, "--max-new-tokens", "8", "--repeats", "1"]
    grafted.main()


def main(arguments: list[str]) -> int:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    state = torch.get_rng_state
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "get_rng_state": lambda device=None: state(),
        "set_rng_state": lambda new_state, device=None: None,
        "manual_seed_all": lambda seed: None,
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", value))
        stack.enter_context(emulated())
        if arguments[0] == "-c":
            exec(arguments[1])
        elif arguments[:2] == ["-m", "pytest"]:
            return int(pytest.main(arguments[2:], plugins=[FirstCases()]))
        else:
            bench(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
