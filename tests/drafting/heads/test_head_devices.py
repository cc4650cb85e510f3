"""A target whose layers lie on two devices, as with `device_map`: a head's states come to it in one transfer each."""

import copy
from pathlib import Path

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerator import CPU, emulated, on_device
from alignment import GREEDY, loaded, target_of, watched
from head_files import random_head
from tiny import prompts
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding


def spread(target: PreTrainedModel, first: int) -> PreTrainedModel:
    """A copy whose layers from `first` on, norm and head lie on the accelerator, under the hooks of accelerate."""
    moved = copy.deepcopy(target)
    for number in range(first, len(moved.model.layers)):
        moved.model.layers[number] = on_device(moved.model.layers[number])
    moved.model.norm, moved.lm_head = on_device(moved.model.norm), on_device(moved.lm_head)
    for part in (moved.model.embed_tokens, *moved.model.layers, moved.model.norm, moved.lm_head):
        device = next(part.parameters()).device
        add_hook_to_module(part, AlignDevicesHook(device, io_same_device=False, skip_keys=["cache"]))
    add_hook_to_module(moved, AlignDevicesHook(CPU, io_same_device=False, skip_keys=["cache"]))
    return moved


@pytest.mark.parametrize("first", [3, 6])
def test_layers_on_two_devices(first: int, tmp_path: Path):
    """Of seven states four or one come from the other device: on the way to the head none of them is waited for."""
    target = target_of()
    head = random_head(layer_ids=(0, 1, 2, 3, 4, 5, 7))
    expected = target.generate(**prompts(2), **GREEDY)
    draft = loaded(head, tmp_path, target)
    with emulated() as device:
        strategy = SpeculativeDecoding(on_device(draft), num_draft_tokens=2)
        watch = watched(strategy, head, target)
        found = spread(target, first).generate(**prompts(2), **GREEDY, custom_generate=strategy)
    assert torch.equal(found, expected)
    watch.check(20)
    rounds = strategy.report.rounds
    waits = {line.split(":")[0]: 0 for line in device.waits} | {"heads/driver.py": 0, "models/decoder.py": 0}
    for line, number in device.waits.items():
        waits[line.split(":")[0]] += number
    ours = [line for line in device.sends if line.startswith(("models/decoder", "heads/driver"))]
    assert sum(device.sends[line] for line in ours) <= 4  # of the prompts
    assert waits["models/decoder.py"] <= rounds + 2  # for the logits, which rows on the CPU are judged by
    assert waits["heads/driver.py"] <= 2 * rounds  # and for those that each of two candidates is drawn by
