"""The same tokens as plain `generate` on the device, greedily and under the same seed, in every layout."""

from functools import cache

import pytest
import torch
import zoo
from counting import counting
from device import DEVICE, moved, on_device
from plain import assert_plain, generator_state
from tiny import VOCAB_SIZE, Forwards, near, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding, generate


pytestmark = on_device
LAYOUTS = {
    "llama": "ragged padded packed lockstep",
    "gpt2": "ragged padded packed lockstep",
    "qwen2": "ragged padded packed lockstep",  # one of its layers has a sliding window
    "opt": "ragged padded packed lockstep",
    "t5": "padded lockstep",
    "mamba2": "lockstep",
}
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts.split()]
NOISES = {"t5": 0.25, "mamba2": 0.02}
MODES = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 20, "temperature": 0.9}}
NEW_TOKENS = 24
PLACES = [(DEVICE, "cpu"), ("cpu", DEVICE)]


@cache
def pair(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    known = {"t5": "seq2seq", "mamba2": "causal"}
    target = zoo.build(known[model_type], model_type) if model_type in known else tiny(model_type)
    draft = near(target, NOISES.get(model_type, 0.05))
    return target.to(DEVICE), draft.to(DEVICE)


def inputs_of(model_type: str, rows: int) -> dict[str, torch.Tensor]:
    special = model_type in ("t5", "mamba2")
    return moved(zoo.inputs(pair(model_type)[0], rows) if special else prompts(rows))


def coupled(draft: PreTrainedModel, layout: str = "auto") -> SpeculativeDecoding:
    return SpeculativeDecoding(draft, num_draft_tokens=3, verification="coupled", layout=layout)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(("model_type", "layout"), CASES)
def test_equals_generate(model_type: str, layout: str, rows: int, mode: str):
    target, draft = pair(model_type)
    strategy, options = coupled(draft, layout), MODES[mode] | {"max_new_tokens": NEW_TOKENS}
    with counting(draft) as drafted:
        found = assert_plain(target, strategy, inputs_of(model_type, rows), seed=4, **options)
    assert strategy.report is not None
    assert strategy.report.layout == layout
    assert len(drafted) > 1
    if layout != "lockstep" or rows == 1:  # where one of many rows nearly always rejects
        assert found.forwards < NEW_TOKENS


@pytest.mark.parametrize("layout", LAYOUTS["llama"].split())
def test_rows_that_end_early(layout: str):
    target, draft = pair("llama")
    options = MODES["sampled"] | {"eos_token_id": [5, 9, 20, 33], "pad_token_id": 0, "max_new_tokens": 40}
    text = assert_plain(target, coupled(draft, layout), inputs_of("llama", 8), seed=4, **options).text
    assert len(set((text != 0).sum(1).tolist())) > 2


def test_seeds_give_each_row_the_text_that_it_has_alone():
    target, draft = pair("llama")
    inputs, seeds = inputs_of("llama", 3), [7, 0, 2**40 + 3]
    sampled = MODES["sampled"] | {"max_new_tokens": NEW_TOKENS}
    options = {"draft_model": draft, "num_draft_tokens": 3, "verification": "coupled"}
    state = generator_state(DEVICE)
    output = generate(model=target, **options, **inputs, **sampled, seeds=seeds)
    assert torch.equal(generator_state(DEVICE), state)
    for row, seed in enumerate(seeds):
        torch.manual_seed(seed)
        alone = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        assert torch.equal(output[row : row + 1], target.generate(**alone, **sampled))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("home", "draft_home"), PLACES, ids=["draft on the CPU", "target on the CPU"])
def test_models_on_two_devices(home: torch.device | str, draft_home: torch.device | str, mode: str):
    made = tiny()
    target, draft = near(made, 0.0).to(home), near(made, 0.05).to(draft_home)
    inputs = {name: tensor.to(home) for name, tensor in prompts(3).items()}
    with Forwards(draft) as drafted:
        assert_plain(target, coupled(draft), inputs, seed=4, **MODES[mode], max_new_tokens=NEW_TOKENS)
    assert drafted.ids[0].device.type == torch.device(draft_home).type


@pytest.mark.parametrize("verification", ["block", "token", "coupled"])
@pytest.mark.parametrize("layout", LAYOUTS["llama"].split())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_runs(dtype: torch.dtype, layout: str, verification: str):
    """Other batch sizes round otherwise, so that texts may differ: here they are whole, and drafts are accepted."""
    made = tiny()
    target, draft = near(made, 0.0).to(DEVICE, dtype), near(made, 0.02).to(DEVICE, dtype)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification=verification, layout=layout)
    torch.manual_seed(4)
    output = target.generate(**moved(prompts(8)), do_sample=True, max_new_tokens=NEW_TOKENS, custom_generate=strategy)
    assert output.shape == (8, 11 + NEW_TOKENS)
    assert ((output >= 0) & (output < VOCAB_SIZE)).all()
    assert strategy.report is not None
    assert strategy.report.accepted > strategy.report.drafted / 4
