"""Several threads on the same models: what one of them replaces for a forward, the others do not meet."""

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from tiny import near, prompts, tiny
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.hub import pair_source
from hf_specx.hub.flatten import published_code
from hf_specx.models.attention import ACTIVE, GroupedAttention
from hf_specx.models.position_tables import ColumnTable


GREEDY = {"do_sample": False, "max_new_tokens": 18}
LAYOUTS = {"llama": "ragged", "bart": "padded", "nemotron_h": "lockstep"}
ROUNDS = 3

pytestmark = pytest.mark.filterwarnings("ignore:in this batch all rows advance")


@cache
def models(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and its draft. llama's heads share keys, bart looks up positions, nemotron_h limits its time steps."""
    target = tiny() if name == "llama" else zoo.build("seq2seq" if name == "bart" else "causal", name)
    return target, near(target, 0.2)


def inputs(name: str, rows: int) -> dict[str, torch.Tensor]:
    return prompts(rows) if name == "llama" else zoo.inputs(models(name)[0], rows)


def stock(name: str, rows: int = 3) -> torch.Tensor:
    return models(name)[0].generate(**inputs(name, rows), **GREEDY)


def ours(
    name: str,
    rows: int = 3,
    num_draft_tokens: int = 3,
    verification: str = "token",
    by: type = SpeculativeDecoding,
    **settings: Any,
) -> torch.Tensor:
    target, draft = models(name)
    strategy = by(draft, num_draft_tokens=num_draft_tokens, verification=verification, layout=LAYOUTS[name])
    output = target.generate(**inputs(name, rows), **GREEDY | settings, custom_generate=strategy)
    assert strategy.report.layout == LAYOUTS[name]
    assert 0 < strategy.report.accepted < strategy.report.drafted
    return output


def in_another_thread(job: Callable[[], Any]) -> Any:
    """What a job gives in a thread of its own, from its start to its end."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(job).result()


def as_it_was(name: str) -> list:
    """All that a call could leave behind on the models and in this context."""
    modules = [module for model in models(name) for module in model.modules()]
    return [
        dict(ALL_ATTENTION_FUNCTIONS),
        [(set(vars(module)), vars(module).get("time_step_limit"), dict(module._modules)) for module in modules],
        [model.generation_config.to_dict() for model in models(name)],
    ]


@pytest.fixture(params=LAYOUTS)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    before = as_it_was(request.param)
    yield request.param
    assert as_it_was(request.param) == before


@pytest.fixture
def met(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[int, str]]]:
    """Which threads have met what is replaced, by their numbers."""
    found: set[tuple[int, str]] = set()
    attend, look_up = GroupedAttention.__call__, ColumnTable.forward

    def noted_attention(*args, **kwargs):
        found.add((threading.get_ident(), "attention"))
        return attend(*args, **kwargs)

    def noted_table(*args, **kwargs):
        found.add((threading.get_ident(), "table"))
        return look_up(*args, **kwargs)

    def note_limit(module, args):
        if module.time_step_limit[0] == 0:
            found.add((threading.get_ident(), "limit"))

    monkeypatch.setattr(GroupedAttention, "__call__", noted_attention)
    monkeypatch.setattr(ColumnTable, "forward", noted_table)
    mixers = [module for module in models(name)[0].modules() if hasattr(module, "time_step_limit")]
    handles = [mixer.register_forward_pre_hook(note_limit) for mixer in mixers]
    yield found
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("other", [stock, ours])
def test_a_whole_call_in_the_middle_of_a_forward(name: str, other: Callable, met: set[tuple[int, str]]):
    """Another thread begins and ends while a round of ours stands between two layers; both texts are stock's."""
    expected, here, forwards, found = stock(name), threading.get_ident(), [], []

    def hook(module, args):
        if threading.get_ident() == here and ACTIVE.get():
            forwards.append(None)
            if len(forwards) == 3:
                found.append(in_another_thread(lambda: (threading.get_ident(), other(name, rows=4))))

    handle = models(name)[0].get_decoder().layers[1].register_forward_pre_hook(hook)
    output = ours(name)
    handle.remove()
    ((thread, text),) = found
    assert torch.equal(output, expected)
    assert torch.equal(text, stock(name, rows=4))
    met_here = {what for ident, what in met if ident == here}
    assert {"llama": "attention", "bart": "table", "nemotron_h": "limit"}[name] in met_here
    assert {what for ident, what in met if ident == thread} == (set() if other is stock else met_here)


def test_threads_side_by_side(name: str):
    """Greedy and sampled texts with other numbers of candidates, beside stock: all begin each round together."""
    target, _ = models(name)
    settings = {"do_sample": True, "top_k": 0}
    jobs = {
        "three": lambda: ours(name, 3, num_draft_tokens=3),
        "four": lambda: ours(name, 4, num_draft_tokens=5),
        "sampled": lambda: ours(name, 2, **settings),
        "seeded": lambda: ours(name, 2, verification="coupled", **settings, seeds=[4, 5]),
        "stock": lambda: stock(name, 2),
    }
    expected = {"three": stock(name, 3), "four": stock(name, 4), "stock": stock(name, 2), "seeded": jobs["seeded"]()}
    barrier = threading.Barrier(len(jobs), timeout=60)

    def run(job: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        outputs = []
        for _ in range(ROUNDS):
            barrier.wait()
            outputs.append(job())
        return outputs

    with ThreadPoolExecutor(len(jobs)) as pool:
        outputs = dict(zip(jobs, pool.map(run, jobs.values()), strict=True))
    for job, text in expected.items():
        assert all(torch.equal(output, text) for output in outputs[job]), job
    assert all(output.shape == outputs["stock"][0].shape for output in outputs["sampled"])
    assert len({tuple(output.flatten().tolist()) for output in outputs["sampled"]}) > 1
    assert all(output.min() >= 0 and output.max() < target.config.vocab_size for output in outputs["sampled"])


@pytest.mark.parametrize("form", ["strategy", "pair", "pair with options"])
def test_one_strategy_in_several_threads(form: str):
    """A call begins and ends in the middle of another one: numbers of candidates and reports do not mix."""
    (target, draft), found, here = models("llama"), [], threading.get_ident()
    pair, strategy = DraftTargetPair(target, draft), SpeculativeDecoding(draft)
    options = {"strategy": {"custom_generate": strategy}, "pair": {}, "pair with options": {"verification": "token"}}
    generate = target.generate if form == "strategy" else pair.generate

    def call(rows: int, number: int) -> Any:
        settings = GREEDY | {"num_assistant_tokens": number, "return_dict_in_generate": True}
        return generate(**inputs("llama", rows), **settings, **options[form])

    def hook(module, args):
        if threading.get_ident() == here:
            found.append(None)
            if len(found) == 3:
                found[:1] = [in_another_thread(lambda: call(4, 5))]

    handle = target.register_forward_pre_hook(hook)
    output = call(3, 2)
    handle.remove()
    for result, rows, number in ((output, 3, 2), (found[0], 4, 5)):
        report = result.speculation_report
        assert torch.equal(result.sequences, stock("llama", rows))
        assert report.emitted_per_row == [18] * rows
        assert max(r.drafted for row in report.history for r in row) == number
    assert (strategy if form == "strategy" else pair).report is output.speculation_report


def test_the_draft_keeps_its_own_settings_while_it_is_prepared(monkeypatch: pytest.MonkeyPatch):
    """Another thread generates with the draft at the moment when ours has it read the prompts by other settings."""
    draft = models("bart")[1]
    monkeypatch.setattr(draft.generation_config, "max_new_tokens", 7)
    expected, found = draft.generate(**inputs("bart", 2), do_sample=False), []

    def hook(module, args, output):
        if not found:
            found.append(None)
            found[0] = in_another_thread(lambda: draft.generate(**inputs("bart", 2), do_sample=False))

    handle = draft.get_encoder().register_forward_hook(hook)
    config = draft.generation_config
    output = ours("bart")
    handle.remove()
    assert draft.generation_config is config
    assert torch.equal(found[0], expected)
    assert expected.shape[1] < output.shape[1]


def test_models_are_left_as_they_were_found(name: str, tmp_path: Path):
    """In the middle of a forward of ours, another thread copies, pickles and saves the target."""
    target, found = models(name)[0], []
    expected, names, weights = stock(name), [set(vars(module)) for module in target.modules()], target.state_dict()

    def look():
        target.save_pretrained(tmp_path)
        copies = [copy.deepcopy(target), pickle.loads(pickle.dumps(target)), type(target).from_pretrained(tmp_path)]
        return [set(vars(module)) for module in target.modules()], copies

    def hook(module, args):
        if ACTIVE.get():
            handle.remove()
            found.append(in_another_thread(look))

    handle = target.get_decoder().layers[1].register_forward_pre_hook(hook)
    assert torch.equal(ours(name), expected)
    ((during, copies),) = found
    assert during == names == [set(vars(module)) for module in target.modules()]
    for other in copies:
        assert torch.equal(other.generate(**inputs(name, 3), **GREEDY), expected)
        state = other.state_dict()
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[key], weights[key]) for key in weights)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type]:
    """`SpeculativeDecoding` of a copy of this package, as a published pair has it."""
    folder = tmp_path_factory.mktemp("copy") / "published"
    folder.mkdir()
    source = {"__init__": "", "pair_source": Path(pair_source.__file__).read_text()}
    for module, text in (published_code() | source).items():
        (folder / f"{module}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder.parent)
        yield import_module("published.engine").SpeculativeDecoding


@pytest.mark.parametrize("ours_first", [True, False])
def test_two_copies_of_this_package(name: str, ours_first: bool, published: type):
    """A call by one begins and ends in the middle of a call by the other, more than once; all texts are stock's."""
    expected, here, found = stock(name), threading.get_ident(), []
    others = sys.modules[published.__module__.replace("engine", "models")].ACTIVE
    outer, inner = (SpeculativeDecoding, published) if ours_first else (published, SpeculativeDecoding)

    def hook(module, args):
        if threading.get_ident() == here and (ACTIVE if ours_first else others).get():
            found.append(in_another_thread(lambda: ours(name, by=inner)))

    for _ in range(2):
        handle = models(name)[0].get_decoder().layers[1].register_forward_pre_hook(hook)
        assert torch.equal(ours(name, by=outer, max_new_tokens=6), expected[:, :-12])
        handle.remove()
    assert len(found) > 2
    assert all(torch.equal(text, expected) for text in found)
