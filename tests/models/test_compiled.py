"""Compiled forwards: the text of stock over two buckets of rows, how often torch compiles, and what is left behind.

Where a test is about anything but the compiler, torch traces the same forwards and runs them as they are; where it is
about their buffers alone, it does not even trace them.
"""

import contextlib
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from defaults import defaults
from tiny import near, prompts, tiny
from torch._dynamo.exc import BackendCompilerFailed
from transformers import PreTrainedModel

from hf_specx import EarlyExitDraft, SpeculativeDecoding, generate
from hf_specx.common.architectures import LAYOUTS_OF
from hf_specx.common.batch import Batch
from hf_specx.common.kernels import KNOWN
from hf_specx.engine.report import SpeculationReport
from hf_specx.models import compiled, compiled_forwards
from hf_specx.models.attention import SWITCH
from hf_specx.models.choose import layouts_of, make_runner
from hf_specx.models.compiled import CompiledRunner, check_compile, has_compiler
from hf_specx.models.prompts import prepare
from hf_specx.models.slots import Pool


pytestmark = pytest.mark.filterwarnings("ignore:compile=True compiles")
needs_compiler = pytest.mark.skipif(not has_compiler("cpu"), reason="torch finds no C++ compiler")
slow = partial(pytest.param, marks=pytest.mark.slow)
SAMPLED = {"do_sample": True, "top_k": 0}
SHORT = {"rows": 2, "max_new_tokens": 8, "do_sample": False}
ENDS = {"eos_token_id": [29, 32, 38], "pad_token_id": 0, "max_new_tokens": 24}  # four rows end one after another


@cache
def pair(model_type: str = "llama", **changes) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny(model_type, **changes)
    return target, near(target, 0.05)


def same(target: PreTrainedModel, draft: PreTrainedModel, rows: int = 4, **call) -> SpeculationReport:
    """Assert that the text is stock's, by a strategy of its own for each call; a hook would change the model."""
    strategy, texts = SpeculativeDecoding(draft, num_draft_tokens=2, verification="coupled", compile=True), []
    for custom in (None, strategy):
        torch.manual_seed(3)
        texts.append(target.generate(**prompts(rows) | call, custom_generate=custom))
    assert torch.equal(*texts)
    return strategy.report


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, capacity) of all buffers, in order."""
    sizes: list[tuple[int, int]] = []
    allocate = Pool.allocate

    def note(pool, owner, rows, slots, like):
        sizes.append((rows, max(slots)))
        return allocate(pool, owner, rows, slots, like)

    monkeypatch.setattr(Pool, "allocate", note)
    return sizes


@pytest.fixture
def captured(traced: None, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether it is captured in graphs, of each part of a forward that is compiled."""
    flags: list[bool] = []

    def look(graph, inputs, config_patches):
        flags.append(config_patches["triton.cudagraphs"])
        return graph

    monkeypatch.setattr(compiled_forwards, "lookup_backend", lambda name: look)
    return flags


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of C++ that are compiled."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    sources: list[str] = []
    load = CppPythonBindingsCodeCache.load_async

    def note(source, *args, **kwargs):
        sources.append(source)
        return load(source, *args, **kwargs)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", note)
    return sources


@pytest.mark.parametrize("compiler", ["traced", pytest.param("inductor", marks=[pytest.mark.slow, needs_compiler])])
def test_two_buckets_of_rows(
    compiler: str, taken: list, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    """Four buffer rows, then two: six forwards in all, for every call and strategy; rows end as in `generate`.

    The kernels of each are compiled in one file, by a torch in which that is known to work.
    """
    monkeypatch.setattr(compiled_forwards, "IDLE_FORWARDS", 0)
    files = request.getfixturevalue("traced" if compiler == "traced" else "files")
    target, draft = pair(num_hidden_layers=1)
    before = torch._dynamo.config.get_config_copy()
    compilations = []
    for settings in (SAMPLED, {"do_sample": False}, SAMPLED):
        report = same(target, draft, **settings, **ENDS)
        active = [sum(len(row) > i for row in report.history) for i in range(1, max(map(len, report.history)))]
        assert {4, 3, 2} == set(active)
        compilations.append(report.compilations)
    # drafts of one token and of two, and the target's of three, for each bucket
    assert compilations == [6, 0, 0]
    assert compiler == "traced" or not KNOWN or [x.count("PyInit_kernel(") > 1 for x in files] == 6 * [True]
    assert before == torch._dynamo.config.get_config_copy()
    assert SWITCH.active.get() is None
    assert taken[:4] == [(4, 96)] * 2 + [(2, 96)] * 2  # of target and draft: places stay until half are idle
    texts = []
    for compile in (False, True):
        torch.manual_seed(3)
        strategy = SpeculativeDecoding(draft, num_draft_tokens=2, verification="block", compile=compile)
        texts.append(target.generate(**prompts(4), **SAMPLED, **ENDS, custom_generate=strategy))
    assert torch.equal(*texts)


def test_fewer_rows_are_compiled_once_that_pays(untraced: None, taken: list, monkeypatch: pytest.MonkeyPatch):
    """Until then those of a batch that has ended in part are idle, in as few buffer rows as are compiled already.

    What was compiled for texts of another length does not count.
    """
    monkeypatch.setattr(compiled_forwards, "IDLE_FORWARDS", 30)
    target = tiny(num_hidden_layers=1)
    draft = near(target, 0.05)
    same(target, draft, rows=2, **SAMPLED, max_new_tokens=80)
    assert {slots for _, slots in taken} == {128}
    taken.clear()
    compilations = [same(target, draft, **SAMPLED, **ENDS).compilations for _ in range(9)]
    assert compilations[0] == sum(compilations[1:]) == 3
    assert compilations[-1] == 0
    assert [rows for rows, _ in taken[:2] + taken[-4:]] == [4, 4, 4, 4, 2, 2]


def test_rounds_with_idle_rows_are_not_timed(untraced: None, monkeypatch: pytest.MonkeyPatch):
    """They take longer than those of as many rows will."""
    monkeypatch.setattr(compiled_forwards, "IDLE_FORWARDS", 10**6)
    target = tiny(num_hidden_layers=1)
    strategy = SpeculativeDecoding(near(target, 0.5), verification="coupled", compile=True)
    torch.manual_seed(3)
    target.generate(**prompts(4), **SAMPLED | ENDS | {"max_new_tokens": 60}, custom_generate=strategy)
    rows = [sum(len(row) > i for row in strategy.report.history) for i in range(60)]
    assert rows.count(2) + rows.count(1) > 8
    assert {4} <= set(strategy.costs.rounds) <= {3, 4}


def test_buffers_grow_behind_their_room(untraced: None, taken: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "ROOM", 4)
    same(*pair(num_hidden_layers=1), rows=2, max_new_tokens=60, do_sample=False)
    assert {(2, 64), (2, 128)} <= set(taken)


def test_a_round_that_the_end_cuts_short_is_filled_up(untraced: None):
    """So that it is not compiled anew: the target's forward is of three tokens, the draft's of one or two."""
    target = tiny(num_hidden_layers=1)
    report = same(target, near(target, 0.0), rows=2, max_new_tokens=12, do_sample=False)
    assert [record.drafted for record in report.history[0]] == [0, 2, 2, 2, 1]
    assert report.compilations == 3


def test_holes_and_the_cache_for_the_next_turn(untraced: None):
    """A mask with holes behind its pads, and the keys that come back, also of rows that left early."""
    target, draft = pair(num_hidden_layers=1)
    mask = prompts(4)["attention_mask"].clone()
    mask[0, 4:6] = 0
    call = prompts(4) | {"attention_mask": mask, "return_dict_in_generate": True, **SAMPLED, **ENDS}
    options, outputs = {"num_draft_tokens": 2, "verification": "coupled"}, []
    for compiles in (None, True, False):
        custom = None if compiles is None else SpeculativeDecoding(draft, compile=compiles, **options)
        torch.manual_seed(3)
        outputs.append(target.generate(**call, custom_generate=custom))
    expected, output, eager = outputs
    assert torch.equal(output.sequences, expected.sequences)
    for ours, theirs in zip(output.past_key_values.layers, eager.past_key_values.layers, strict=True):
        assert torch.allclose(ours.keys, theirs.keys, atol=1e-4)
        assert torch.allclose(ours.values, theirs.values, atol=1e-4)


@pytest.mark.parametrize("model_type", [slow("llama"), "gpt2"])
@torch.no_grad()
def test_a_row_with_fewer_tokens_than_another_lacks(untraced: None, model_type: str):
    """As when a draft has rested, and a prompt was admitted meanwhile: each row is fed its own tokens alone."""
    target, _ = pair(model_type)
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, :9] = 0
    prompt = prepare(target, 40, {"input_ids": prompts(2)["input_ids"].clamp(min=1), "attention_mask": mask})
    runner, batch = make_runner("ragged", prompt, compiled=True), Batch(prompt.input_ids, mask, 0)
    runner.prefill()
    runner.has_all_prompt_logits = False
    batch.emit(torch.arange(1, 39).view(2, 19), [19, 1])  # filled up to 20
    for token in (3, 4):
        expected = torch.cat([target(batch.row(row)[None]).logits[:, -1:] for row in range(2)])
        assert torch.allclose(runner.decode_step(batch, 0), expected, atol=1e-4)
        batch.emit(torch.full((2, 1), token), [1, 1])


RAGGED = [each for each in zoo.model_types() if each[0] == "causal" and "ragged" in LAYOUTS_OF.get(each[1], ())]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("form", ["function", "attached", "attached early exit"])
def test_the_next_call_finds_what_was_compiled(form: str):
    """Neither what a call remembers of its draft nor the context around it is part of a model."""
    target = tiny(num_hidden_layers=2)
    draft = EarlyExitDraft(1) if form == "attached early exit" else near(target, 0.05)
    strategy, counts = SpeculativeDecoding(draft, num_draft_tokens=2, compile=True), []
    call = {**prompts(2), "max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    for _ in range(3):
        if form == "function":
            output = generate(**call, model=target, draft_model=draft, num_draft_tokens=2, compile=True)
        else:
            with strategy.attached(target):
                output = target.generate(**call)
        counts.append(output.speculation_report.compilations)
    assert counts[0] > 0
    assert counts[1:] == [0, 0]


@pytest.mark.usefixtures("traced")
def test_a_default_device_is_none_of_a_forward():
    """It is a mode in which torch would trace no forward; the compiled ones are those of calls without it."""
    target, draft = pair(num_hidden_layers=1)
    inputs, counts = prompts(2), []
    strategy = SpeculativeDecoding(draft, num_draft_tokens=2, compile=True)
    expected = target.generate(**inputs, max_new_tokens=8, do_sample=False)
    for ambient in (defaults(), torch.device("meta"), contextlib.nullcontext()):
        with ambient:
            output = target.generate(**inputs, max_new_tokens=8, do_sample=False, custom_generate=strategy)
        assert torch.equal(output, expected)
        counts.append(strategy.report.compilations)
    assert counts[0] > 0
    assert counts[2] == 0  # under another default dtype they are others


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "model_type"), RAGGED)
def test_each_type_is_compiled(traced: None, kind: str, model_type: str):
    """And the model is as it was, for a plain call."""
    target = zoo.build(kind, model_type)
    try:
        check_compile(target, layouts_of(target)[0], "", False)
    except ValueError as refused:
        pytest.skip(str(refused))
    strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=2, verification="coupled", compile=True)
    call = zoo.inputs(target) | {"do_sample": False, "max_new_tokens": 10}
    first, ours, again = (target.generate(**call, custom_generate=custom) for custom in (None, strategy, None))
    assert torch.equal(first, ours)
    assert torch.equal(first, again)


def test_layers_that_are_alike_are_compiled_once(captured: list):
    """Each forward has three parts: a layer, what is before the first, and what is behind the last."""
    report = same(*pair(num_hidden_layers=2, num_key_value_heads=2), **SHORT)
    assert captured == 3 * report.compilations * [False]
    assert captured


def test_a_graph_serves_the_thread_that_captured_it(captured: list, monkeypatch: pytest.MonkeyPatch):
    """In another one, torch would not find what it has captured."""
    target, draft = pair(num_hidden_layers=1, seed=5)
    monkeypatch.setattr(
        compiled,
        "compiled_forwards_of",
        lambda model, _: compiled_forwards.compiled_forwards_of(model, torch.device("cuda")),
    )
    same(target, draft, **SHORT)
    assert all(captured)
    before = len(captured)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(same, target, draft, **SHORT).result()
    assert captured[before:] == [False] * before


def test_forwards_go_with_their_model(traced: None):
    target, draft = tiny(num_hidden_layers=1), tiny(num_hidden_layers=1, seed=1)
    same(target, draft, **SHORT)
    assert len(compiled_forwards.COMPILED_FORWARDS) == 2
    gone = [weakref.ref(thing) for thing in (target, draft, *compiled_forwards.COMPILED_FORWARDS.values())]
    del target, draft
    gc.collect()
    assert [thing() for thing in gone] == 4 * [None]
    assert not len(compiled_forwards.COMPILED_FORWARDS)


def test_a_model_that_was_changed_is_compiled_anew(traced: None):
    """Weights are read in each forward; a setting of a module, or a hook, was taken for a constant."""
    target = tiny(num_hidden_layers=1, tie_word_embeddings=True)
    draft, seen = tiny(num_hidden_layers=1, seed=1), []

    def weights():
        target.lm_head.weight.data.mul_(-1)

    def setting():
        target.model.layers[0].self_attn.scaling *= 9

    def hook():
        target.lm_head.register_forward_hook(lambda module, args, output: output.roll(1, -1))

    def untied():
        target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.roll(1, 0))

    def strides():
        target.model.layers[0].mlp.up_proj.weight.data = target.model.layers[0].mlp.up_proj.weight.T.contiguous().T

    def module():  # which may be where the one before was
        target.model.layers[0].mlp.down_proj = None
        target.model.layers[0].mlp.down_proj = torch.nn.Linear(48, 32, bias=False)

    for change in (lambda: None, weights, setting, hook, untied, strides, *3 * [module], target.double):
        change()
        seen.append(same(target, draft, **SHORT).compilations > 0)
    assert seen == [True, False, *8 * [True]]


SCALES = [1.0]  # read by a hook


def test_a_hook_that_reads_a_global_is_not_compiled(traced: None):
    """Torch would not see that the list has changed, nor that it has become shorter. The draft's forwards are."""
    target = tiny(num_hidden_layers=1, seed=7)
    draft = near(target, 0.05)

    def scale(output):
        return output * SCALES[-1]

    target.lm_head.register_forward_hook(lambda module, args, output: scale(output))
    for scales in ([1.0, 2.0, 3.0], [0.5], [torch.tensor(2.0)]):
        SCALES[:] = scales
        same(target, draft, **SAMPLED, max_new_tokens=8)
    compilations = [compiled_forwards.COMPILED_FORWARDS[model].compilations for model in (target, draft)]
    assert compilations[0] == 0 < compilations[1]


def test_a_replaced_forward_is_compiled_anew(traced: None):
    target = tiny(num_hidden_layers=1, seed=8)
    draft, plain = near(target, 0.05), target.lm_head.forward
    for factor in (1.0, -1.0):
        target.lm_head.forward = lambda x, factor=factor: plain(x) * factor
        same(target, draft, **SAMPLED, max_new_tokens=8)
    assert compiled_forwards.COMPILED_FORWARDS[target].compilations > 0


def test_other_threads_may_add_sizes_and_hooks_meanwhile():
    """What is looked through adds some itself."""
    target = tiny(num_hidden_layers=1)
    forwards = compiled_forwards.CompiledForwards(target, False, 0)

    class Capacity(int):
        __hash__ = int.__hash__

        def __eq__(self, other):
            forwards.sizes.add((1, len(forwards.sizes)))
            return int(self) == other

    class Hook:
        func = property(lambda _: target.register_forward_hook(print))

    assert [target.register_forward_hook(Hook()) for _ in range(2)]
    assert compiled_forwards.traits(target) != compiled_forwards.traits(target)
    assert [forwards.rows(2, 4, Capacity(64)) for _ in range(2)] == [2, 2]


def test_buffers_are_zeros_and_nobody_elses_while_they_are_in_use():
    """What an earlier call has left in them may be no number, which even a hidden slot would spread."""
    pool, like = Pool(), [(torch.ones(2, 1, 5, 4), torch.ones(2, 1, 5, 4))]
    first, second, third = (torch.nn.Identity() for _ in range(3))
    ((keys, _),) = pool.allocate(first, 2, [8], like)
    assert keys.shape == (2, 1, 8, 4)
    assert pool.allocate(second, 2, [8], like)[0][0] is not keys
    keys.fill_(torch.nan)
    del first
    taken = pool.allocate(third, 2, [8], like)
    assert taken[0][0] is keys
    assert not keys.any()
    del second
    for capacity in (16, 32, 64):  # those that it has outgrown are let go
        taken = pool.allocate(third, 2, [capacity], taken)
    assert [size[:2] for size, _, _ in pool.entries] == [(2, 64)]


@pytest.mark.parametrize("positions", [slow(11 + 15 - 1), 8])
def test_a_table_of_positions_that_ends(untraced: None, positions: int):
    """The target's with the text, and the draft's perhaps within the prompt; the last round is filled up behind it."""
    target = tiny("gpt2", num_hidden_layers=1, max_position_embeddings=11 + 15 - 1)
    draft = tiny("gpt2", seed=1, num_hidden_layers=1, max_position_embeddings=positions)
    same(target, draft, rows=3, max_new_tokens=15, do_sample=False)


def test_an_error_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, traced: None):
    target, draft = pair(num_hidden_layers=1)
    with monkeypatch.context() as patch:
        patch.setattr(compiled_forwards, "lookup_backend", lambda name: lambda graph, inputs, config_patches: 1 / 0)
        with pytest.raises(BackendCompilerFailed, match="ZeroDivisionError"):
            same(target, draft, **SHORT)
    assert SWITCH.active.get() is None
    same(target, draft, **SHORT)


@pytest.mark.parametrize("first", [slow(True), False])
def test_inference_mode_in_one_call_and_not_in_the_next(traced: None, first: bool):
    """Buffers are kept from call to call."""
    for mode in (first, not first):
        with torch.inference_mode(mode):
            same(*pair(num_hidden_layers=1), **SHORT)


def test_one_row_is_compiled_once_for_all_widths(traced: None):
    """A column of its text has the stride of the whole text, by which torch tells tensors."""
    target, draft = pair()
    for width in range(3, 9):
        ids = torch.arange(1, 1 + width)[None]
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 6}
        assert (same(target, draft, rows=1, **call).compilations > 0) == (width == 3)


def test_forwards_that_switch_autocast_are_compiled_whole(traced: None):
    """Nemotron's norms leave it; buffers of an earlier call without it have values of another precision."""
    target, texts = tiny("nemotron", num_hidden_layers=1), []
    for compile, autocast in ((True, False), (False, True), (True, True)):
        strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=3, compile=compile)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            texts.append(target.generate(**prompts(2), do_sample=False, max_new_tokens=8, custom_generate=strategy))
    assert torch.equal(*texts[1:])


def test_layers_that_differ_in_a_number_are_compiled_apart(traced: None):
    target, texts = tiny("llama", num_hidden_layers=3), []
    target.model.layers[1].self_attn.scaling *= 4
    for compile in (False, True):
        strategy = SpeculativeDecoding(tiny(num_hidden_layers=1), num_draft_tokens=3, compile=compile)
        texts.append(target.generate(**prompts(2), do_sample=False, max_new_tokens=20, custom_generate=strategy))
    assert torch.equal(*texts)


def test_a_chain_is_no_longer_for_the_trees_before_it():
    """A round that the end of the text cuts short is as long as others of its kind."""
    runner: Any = SimpleNamespace(usual={"chain": 1, "tree": 1})

    def length(count: int, tree: Any = None, remaining: int = 100) -> int:
        batch: Any = SimpleNamespace(tree=tree, rows=[0], remaining_tokens=lambda row: remaining)
        return CompiledRunner._length(runner, batch, count, count - 1)

    chain, tree = length(5), length(17, SimpleNamespace(depth=4))
    assert chain < tree
    assert length(3, remaining=2) == length(5) == chain
    assert length(9, SimpleNamespace(depth=4), remaining=2) == tree
