"""Folding query heads that share keys into the query length gives what the host's `sdpa` function gives."""

import contextlib
import contextvars
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from all_pairs import all_pairs
from plain import assert_plain, coupled
from tiny import near, prompts, tiny
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_specx import SpeculativeDecoding
from hf_specx.models.attention import SWITCH, grouped_attention, grouped_queries, tiled


ROWS, KEYS = 3, 13
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-14}
MODULE = sys.modules["hf_specx.models.attention"]


def tensors(
    group: int, count: int, dtype: torch.dtype = torch.float32
) -> tuple[SimpleNamespace, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A module with `group` query heads to each of 2 key heads; queries, keys and values as models lay them out."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(ROWS, count, 2 * group, 8, dtype=dtype, generator=generator).transpose(1, 2)
    key = torch.randn(ROWS, 2, 2 * KEYS, 8, dtype=dtype, generator=generator)[:, :, :KEYS]
    value = torch.randn(ROWS, 2, 2 * KEYS, 6, dtype=dtype, generator=generator)[:, :, :KEYS]
    return SimpleNamespace(num_key_value_groups=group, is_causal=True), query, key, value


def ragged_mask(count: int) -> torch.Tensor:
    """[R, 1, count, S] bool: rows begin and end in different slots."""
    ends = torch.tensor([13, 9, 11])[:, None, None, None] - count + torch.arange(count)[:, None]
    first = torch.tensor([0, 4, 2])[:, None, None, None]
    return (torch.arange(KEYS) <= ends) & (torch.arange(KEYS) >= first)


@pytest.fixture
def host_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The keyword arguments of each call that is passed on to the host."""
    calls = []

    def noted(*args, **kwargs):
        calls.append(kwargs)
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setattr(MODULE, "sdpa_attention_forward", noted)
    return calls


@pytest.mark.parametrize(
    ("group", "count", "dtype", "additive"), all_pairs([1, 2, 4, 7], [1, 5], [*BOUNDS], [False, True])
)
def test_equals_the_host(group: int, count: int, dtype: torch.dtype, additive: bool, host_calls: list):
    module, query, key, value = tensors(group, count, dtype)
    mask = ragged_mask(count)
    if additive:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    output, weights = grouped_attention(
        module, query, key, value, mask, scaling=0.3, position_ids=torch.zeros(1), use_cache=True, sliding_window=4
    )
    assert not host_calls
    assert weights is None
    assert output.shape == expected.shape == (ROWS, count, 2 * group, 6)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected, rtol=0, atol=BOUNDS[dtype])


def test_a_mask_serves_layers_with_other_groups_and_dtypes():
    """The tile is kept by mask; what is kept for one layer is not given to another kind of layer."""
    mask = ragged_mask(5)
    for group, dtype in ((2, torch.float32), (4, torch.float32), (4, torch.float64), (2, torch.float32)):
        module, query, key, value = tensors(group, 5, dtype)
        expected, _ = sdpa_attention_forward(module, query, key, value, mask)
        output, _ = grouped_attention(module, query, key, value, mask)
        torch.testing.assert_close(output, expected, rtol=0, atol=BOUNDS[dtype])
    assert len(mask.specx_tiles) == 3


def test_a_mask_is_laid_out_as_the_kernels_of_cuda_take_it():
    """In rows of multiples of 16, else torch would copy it in each layer (`preprocess_mask`)."""
    mask = tiled(ragged_mask(5), 2, torch.bfloat16)
    assert all(stride % 16 == 0 for stride in mask.stride()[:-1])


OTHER_CALLS = {
    "no mask": (4, 5, {"attention_mask": None}),
    "a mask for each head": (4, 5, {"attention_mask": ragged_mask(5).expand(-1, 8, -1, -1)}),
    "a mask for all queries": (4, 5, {"attention_mask": ragged_mask(5)[:, :, -1:]}),
    "not known": (4, 5, {"of_tomorrow": 1}),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_calls_go_to_the_host(name: str, host_calls: list):
    group, count, changes = OTHER_CALLS[name]
    module, query, key, value = tensors(group, count)
    kwargs = {"attention_mask": ragged_mask(count), "scaling": 0.3, "is_causal": True} | changes
    if kwargs["attention_mask"] is None:
        key, value = key[:, :, :count], value[:, :, :count]
    expected, _ = sdpa_attention_forward(module, query, key, value, **kwargs)
    output, _ = grouped_attention(module, query, key, value, **kwargs)
    assert torch.equal(output, expected)
    (call,) = host_calls
    assert call == {k: v for k, v in changes.items() if k != "attention_mask"}


def copy_of_the_file() -> ModuleType:
    """Under another name, as each published pair has one."""
    spec = importlib.util.spec_from_file_location("pair.layouts", MODULE.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1)])
def test_forwards_of_several_copies_and_threads_end_in_any_order(order: tuple[int, ...]):
    """The registry is as it was after the last one, whichever began first."""
    other, contexts = copy_of_the_file(), [contextvars.copy_context() for _ in order]
    forwards = [grouped_queries(), other.grouped_queries(), grouped_queries()]
    for context, forward in zip(contexts, forwards, strict=True):
        context.run(forward.__enter__)
    assert [context.run(SWITCH.active.get) for context in contexts] == 3 * [False]
    assert SWITCH.active.get() is None
    for number in order:
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is SWITCH
        contexts[number].run(forwards[number].__exit__, None, None, None)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


@pytest.mark.parametrize("mapping", ["_global_mapping", "_local_mapping"])
@pytest.mark.parametrize("during", [True, False])
def test_a_function_of_the_user_is_left_alone(during: bool, mapping: str, monkeypatch: pytest.MonkeyPatch):
    """Whether it was put there before a forward of ours or in its middle, and also if it calls what was there."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    with grouped_queries() if during else contextlib.nullcontext():
        usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def mine(*args, **kwargs):
            return usual(*args, **kwargs)

        monkeypatch.setitem(getattr(ALL_ATTENTION_FUNCTIONS, mapping), "sdpa", mine)
    module, query, key, value = tensors(4, 5)
    expected, _ = sdpa_attention_forward(module, query, key, value, ragged_mask(5))
    monkeypatch.setattr(MODULE, "grouped_attention", None)
    with grouped_queries():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
        assert torch.equal(mine(module, query, key, value, ragged_mask(5))[0], expected)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine


@pytest.mark.parametrize(("heads", "layout"), [(1, "ragged"), (2, "padded"), (2, "packed"), (8, "ragged")])
def test_models_of_any_group_equal_stock(heads: int, layout: str, monkeypatch: pytest.MonkeyPatch):
    """Sampled under one seed, with rejections; in each forward that has groups heads are folded under one mask."""
    folds = []

    def noted(mask, group, dtype):
        folds.append(group)
        return tiled(mask, group, dtype)

    monkeypatch.setattr(MODULE, "tiled", noted)
    target = tiny("llama", num_attention_heads=8, num_key_value_heads=heads, head_dim=4)
    strategy = coupled(target, 0.05, layout=layout)
    compared = assert_plain(target, strategy, do_sample=True, top_k=0, max_new_tokens=31)
    assert 7 < compared.forwards < 31
    assert set(folds) == {8 // heads}


@pytest.mark.filterwarnings("ignore:.*script_method")
def test_what_a_user_compiles_is_compiled_once():
    """Though torch looks at the registry, it finds the same in each forward of ours, and in each plain one."""
    target, graphs = tiny("llama", num_hidden_layers=1), []
    draft, call = near(target, 0.05), prompts(2) | {"do_sample": False, "max_new_tokens": 8}
    expected = target.generate(**call)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    target.forward = torch.compile(target.forward, backend=backend)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3)
    num_graphs = []
    for _ in range(3):
        assert torch.equal(target.generate(**call, custom_generate=strategy), expected)
        assert torch.equal(target.generate(**call), expected)
        num_graphs.append(len(graphs))
    assert num_graphs[1] == num_graphs[2] > 0
