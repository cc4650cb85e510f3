"""Outside of forwards: the time of rounds there, and the memory of a call."""

import torch
from bench_cases import small, tiny_pair

from hf_specx.bench import probes as bench_probes
from hf_specx.bench.probes import ForwardTimes, LiveMemory, compare_contexts, measure_memory, peak_bytes


def test_forwards_are_timed_but_for_the_prompts(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bench_probes.time, "perf_counter", lambda: now[0])
    pair = tiny_pair()
    pair.target.model.register_forward_pre_hook(lambda module, args: now.__setitem__(0, now[0] + 2.0))
    pair.draft.model.register_forward_pre_hook(lambda module, args: now.__setitem__(0, now[0] + 0.5))
    ids = torch.ones(1, 3, dtype=torch.int64)
    with ForwardTimes(pair.target, pair.draft) as times:
        for model in (pair.target, pair.draft, pair.draft, pair.draft, pair.target, pair.target):
            model(ids)
            now[0] += 100
    assert times.rounds == [2 * 0.5 + 2.0, 2.0]
    pair.target(ids)
    assert times.rounds == [2 * 0.5 + 2.0, 2.0]  # nothing is left on the models


def test_contexts_are_compared():
    pair = tiny_pair(max_position_embeddings=256)
    steps = []
    cell = small("block-2", experiment="context", prompt_tokens=120, new_tokens=6, repeats=2)
    found = compare_contexts(cell, pair, lambda: steps.append(1))["contenders"]["block-2"]
    assert len(steps) == cell.turns == 6
    assert found["ratio"] == found["outside_long"]["median"] / found["outside_short"]["median"]
    assert found["outside_short"]["min"] > 0


def test_memory_is_counted_while_it_lives():
    with LiveMemory() as memory:
        kept = torch.zeros(1000)
        assert memory.live == 4000
        view = kept[10:].view(-1)
        kept.add_(1)
        assert memory.live == 4000
        dropped = torch.ones(500)
        assert memory.live == 6000
        del dropped
        assert memory.live == 4000
        torch.ones(100) + 1
    assert memory.peak == 6000
    del kept
    assert memory.live == 4000  # its view holds it
    del view
    assert memory.live == 0


def test_peak_is_of_what_is_new():
    before = torch.zeros(1000)
    assert peak_bytes(lambda: (before.add_(1), before[1:].mul(2)), torch.device("cpu")) == 999 * 4


def test_memory_of_a_call():
    pair, steps = tiny_pair(), []
    cell = small("block-3", "coupled-3", experiment="memory", batch=2, new_tokens=20)
    found = measure_memory(cell, pair, lambda: steps.append(1))["contenders"]
    assert len(steps) == cell.turns
    for noted in found.values():
        tokens = 2 * (5 + 20 + bench_probes.MARGIN)
        assert noted["kv"] == tokens * 2 * (2 * 2 * 2 * 8 * 4)  # both models: layers, K and V, heads, width, bytes
        assert noted["limit"] == 16 * 2 * 3 * 48
        assert noted["beyond"] == (noted["peak"] - noted["kv"]) / 4


def test_a_wasteful_call_is_seen(monkeypatch):
    """The negative control: a copy of every logit that is kept until the end."""
    pair = tiny_pair()
    cell = small("block-3", experiment="memory", new_tokens=20)
    usual = measure_memory(cell, pair, lambda: None)["contenders"]["block-3"]["beyond"]
    kept = []
    pair.target.register_forward_hook(lambda module, args, output: kept.append(output.logits.repeat(50, 1, 1)))
    wasteful = measure_memory(cell, pair, lambda: None)["contenders"]["block-3"]["beyond"]
    assert wasteful > usual + 10 * 50 * 48
