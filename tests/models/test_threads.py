"""Several threads on the same models: what one of them replaces for a forward, the others do not meet."""

import copy
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from counting import reads_only
from tiny import near, prompts, tiny
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.hub import pair_source
from hf_specx.hub.flatten import published_code


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


def ours(name: str, rows=3, number=3, verification="token", by=SpeculativeDecoding, **settings: Any) -> torch.Tensor:
    target, draft = models(name)
    strategy = by(draft, num_draft_tokens=number, verification=verification, layout=LAYOUTS[name])
    output = target.generate(**inputs(name, rows), **GREEDY | settings, custom_generate=strategy)
    assert strategy.report.layout == LAYOUTS[name]
    assert 0 < strategy.report.accepted < strategy.report.drafted
    return output


@contextmanager
def meanwhile(name: str, job: Callable[[], Any], forward: int = 3) -> Iterator[list[Any]]:
    """Another thread does a job, from its start to its end, while a forward of ours stands between two layers.

    Gives a list, into which goes what the job returns. Forwards are counted from that of the prompts, 1, in this
    thread.
    """
    here, numbers, results = threading.get_ident(), itertools.count(1), []

    @reads_only
    def hook(module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == here and next(numbers) == forward:
            handle.remove()  # which a job that pickles the model would meet
            with ThreadPoolExecutor(1) as pool:
                results.append(pool.submit(job).result())

    handle = models(name)[0].get_decoder().layers[1].register_forward_pre_hook(hook)
    yield results


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


@pytest.mark.parametrize("other", [stock, ours])
def test_a_whole_call_in_the_middle_of_a_forward(name: str, other: Callable):
    """Both texts are stock's."""
    expected = stock(name), stock(name, rows=4)
    with meanwhile(name, lambda: other(name, rows=4)) as found:
        assert torch.equal(ours(name), expected[0])
    (text,) = found
    assert torch.equal(text, expected[1])


def test_threads_side_by_side(name: str):
    """Greedy and sampled texts with other numbers of candidates, beside stock: all begin each round together."""
    target, _ = models(name)
    settings = {"do_sample": True, "top_k": 0}
    jobs = {
        "three": lambda: ours(name, 3),
        "four": lambda: ours(name, 4, number=5),
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


@pytest.mark.parametrize("form", ["strategy", "pair"])
def test_one_strategy_in_several_threads(form: str):
    """A call begins and ends in the middle of another one: numbers of candidates and reports do not mix."""
    target, draft = models("llama")
    pair, strategy = DraftTargetPair(target, draft), SpeculativeDecoding(draft)
    options = {"strategy": {"custom_generate": strategy}, "pair": {}}
    generate = target.generate if form == "strategy" else pair.generate

    def call(rows: int, number: int) -> Any:
        settings = GREEDY | {"num_assistant_tokens": number, "return_dict_in_generate": True}
        return generate(**inputs("llama", rows), **settings, **options[form])

    with meanwhile("llama", lambda: call(4, 5)) as found:
        output = call(3, 2)
    for result, rows, number in ((output, 3, 2), (*found, 4, 5)):
        report = result.speculation_report
        assert torch.equal(result.sequences, stock("llama", rows))
        assert report.emitted_per_row == [18] * rows
        assert max(r.drafted for row in report.history for r in row) == number
    assert (strategy if form == "strategy" else pair).report is output.speculation_report


def test_models_are_left_as_they_were_found(name: str, tmp_path: Path):
    """In the middle of a forward of ours, another thread copies, pickles and saves the target."""
    target, expected = models(name)[0], stock(name)
    names, weights = [set(vars(module)) for module in target.modules()], target.state_dict()

    def look():
        target.save_pretrained(tmp_path)
        copies = [copy.deepcopy(target), pickle.loads(pickle.dumps(target)), type(target).from_pretrained(tmp_path)]
        return [set(vars(module)) for module in target.modules()], copies

    with meanwhile(name, look) as found:
        assert torch.equal(ours(name), expected)
    ((during, copies),) = found
    assert during == names
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


@pytest.mark.parametrize("ours_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_copies_of_this_package(name: str, ours_first: bool, published: type):
    """A call by one begins and ends in the middle of a call by the other; all texts are stock's."""
    expected = stock(name)
    outer, inner = (SpeculativeDecoding, published) if ours_first else (published, SpeculativeDecoding)
    for forward in (1, 2):
        with meanwhile(name, lambda: ours(name, by=inner), forward) as found:
            assert torch.equal(ours(name, by=outer, max_new_tokens=6), expected[:, :-12])
        (text,) = found
        assert torch.equal(text, expected)
