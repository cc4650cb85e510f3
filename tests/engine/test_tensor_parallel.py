"""A target of which two processes hold parts (`tp_plan="auto"`): all of them draft alike, and have the text of one."""

from pathlib import Path

import pytest
import torch
from forking import run_on_ranks
from head_files import random_head, write
from rounds import numbers
from tiny import near, prompts, tiny
from torch import multiprocessing
from transformers import LlamaForCausalLM

from hf_specx import DraftHead, Request, SpeculativeDecoding
from hf_specx.drafting.costs import Costs
from hf_specx.engine import run


GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": [5]}
SAMPLED = GREEDY | {"do_sample": True}
CASES = {"greedy": (GREEDY, None), "coupled": (SAMPLED, "coupled"), "block": (SAMPLED, "block")}
QUEUE = [Request([1 + number, 2, 3], 3 + 4 * (number % 3), seed=number) for number in range(6)]


class Clock:
    """Time that goes by differently on each rank."""

    def __init__(self, rank: int):
        self.generator, self.now = torch.Generator().manual_seed(rank), 0.0

    def __call__(self) -> float:
        self.now += float(torch.rand((), generator=self.generator)) ** 4
        return self.now


def text(target, name: str, rank: int) -> tuple[list[list[int]], list[int]]:
    """What a case gives, and the candidates of its rounds."""
    options, verification = CASES[name]
    strategy = SpeculativeDecoding(near(tiny(), 0.1), verification=verification, costs=Costs(clock=Clock(rank)))
    strategy.listeners = (seen := numbers(),)
    torch.manual_seed(0)
    return target.generate(**prompts(3), **options, custom_generate=strategy).tolist(), seen


def plain(target, name: str) -> list[list[int]]:
    """The text of plain `generate`."""
    torch.manual_seed(0)
    return target.generate(**prompts(3), **CASES[name][0]).tolist()


def play(rank: int, results: dict, folder: str, agreed: bool) -> None:
    if not agreed:
        run.of_first_rank = lambda number, device: number
    target = LlamaForCausalLM.from_pretrained(f"{folder}/target", tp_plan="auto").eval()
    assert target.tp_size == 2
    for name in CASES:
        results[name] = text(target, name, rank)
    head = DraftHead.from_pretrained(f"{folder}/head", target=target)
    strategy = SpeculativeDecoding(head, num_draft_tokens=3, verification="coupled")
    torch.manual_seed(0)
    with_head = target.generate(**prompts(3), **SAMPLED, custom_generate=strategy)
    results["head"] = with_head.tolist(), strategy.report.drafted, strategy.report.accepted
    compiled = SpeculativeDecoding(near(tiny(), 0.1), compile=True)
    with pytest.raises(ValueError, match="compile=True takes models that lie whole on one"):
        target.generate(**prompts(3), **GREEDY, custom_generate=compiled)
    queued = SpeculativeDecoding(near(tiny(), 0.1), costs=Costs(clock=Clock(rank)), verification="coupled")
    results["queue"] = [done.tokens for done in queued.generate_many(target, QUEUE, batch_size=2, **SAMPLED)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    tiny().save_pretrained(folder / "target")
    write(random_head("eagle3", layer_ids=(0, 1), draft_vocab=24), folder / "head")
    for agreed in (True, False):
        (folder / str(agreed)).mkdir()
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[dict]:
    results = run_on_ranks(play, folder / "True", str(folder), True, seconds=20)
    assert not any("error" in seen for seen in results), results
    return results


def test_a_queue_on_both_ranks(outcomes: list[dict]):
    first, second = (seen["queue"] for seen in outcomes)
    assert first == second
    strategy = SpeculativeDecoding(near(tiny(), 0.1), verification="coupled")
    assert sorted(first) == sorted(done.tokens for done in strategy.generate_many(tiny(), QUEUE, **SAMPLED))


def test_every_rank_runs_a_head(outcomes: list[dict]):
    first, second = (seen["head"] for seen in outcomes)
    assert first == second
    text, drafted, accepted = first
    assert text == plain(tiny(), "coupled")
    assert 0 < accepted < drafted


@pytest.mark.parametrize("name", CASES)
def test_both_ranks_have_the_text_of_one_process(outcomes: list[dict], name: str):
    (text_0, numbers_0), (text_1, numbers_1) = (seen[name] for seen in outcomes)
    assert text_0 == text_1
    assert numbers_0 == numbers_1
    assert max(numbers_0) > 0
    if name != "block":  # whose text follows the numbers, which follow the clock that fills the cost table
        assert text_0 == plain(tiny(), name)


@pytest.mark.usefixtures("outcomes")
def test_numbers_of_each_rank_fail(folder: Path):
    """Forwards of other sizes meet, and gloo aborts a process or raises; ranks that agree get through."""
    signal, errors = None, []
    try:
        results = run_on_ranks(play, folder / "False", str(folder), False, seconds=20)
        errors = [seen.get("error", "") for seen in results]
    except multiprocessing.ProcessExitedException as error:
        signal = error.signal_name
    assert signal == "SIGABRT" or any("gloo" in error for error in errors), errors
