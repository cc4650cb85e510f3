"""Ranks that hold parts of the models: all of them run the same forwards until the last one's text is finished.

Two processes on the CPU. A forward of a model that is spread over them is a meeting, so a hook stands in for it that
meets the other rank and compares what both are about to run; the last case is the real thing, FSDP2.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import zoo
from counting import reads_only
from criteria import Counting
from forking import RANKS, run_on_ranks
from tiny import near, prompts, tiny
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LogitsProcessor, PreTrainedModel
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_specx
from hf_specx import SpeculativeDecoding
from hf_specx.drafting.candidates import no_candidates
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.round_timer import RoundTimer
from hf_specx.engine import run as engine_run
from hf_specx.engine.ranks import synced_by_default
from hf_specx.engine.run import Run


TARGET, DRAFT, ENCODER, DONE = 10, 100, 1000, 10000  # what a rank is about to run; far from a flag of 0 or 1
SAMPLED = {"do_sample": True, "top_k": 0}
SHORT_AND_LONG = ({"max_new_tokens": 5}, {"max_new_tokens": 26})


class Case(NamedTuple):
    """What both ranks generate with, and what each of the two sets for itself."""

    model_type: str
    settings: dict[str, Any]
    options: dict[str, Any]
    of_rank: tuple[dict[str, Any], dict[str, Any]] = SHORT_AND_LONG
    lookup: bool = False
    counting: bool = False


ENDS = ({"eos_token_id": list(range(1, 16)), "pad_token_id": 0}, {"eos_token_id": [3], "pad_token_id": 0})
CASES = {
    "sampled": Case("llama", SAMPLED, {"verification": "coupled"}),
    "first rank longer": Case("gpt2", SAMPLED, {"verification": "coupled"}, SHORT_AND_LONG[::-1]),
    "ends": Case("gpt2", {"do_sample": False, "max_new_tokens": 40}, {}, ENDS),
    "packed": Case("llama", {"do_sample": False, "max_new_tokens": 40}, {"layout": "packed"}, ENDS),
    "lockstep": Case("llama", {"do_sample": False, "max_new_tokens": 40}, {"layout": "lockstep"}, ENDS),
    "encoder-decoder": Case("t5", SAMPLED, {"verification": "coupled"}),
    "plain": Case("llama", SAMPLED, {"verification": "coupled"}, counting=True),
    "lookup": Case("llama", {"do_sample": False}, {}, lookup=True),
    "auto": Case("llama", SAMPLED, {"verification": "coupled", "num_draft_tokens": "auto"}),
    "auto, unequal rows": Case(
        "gpt2", SAMPLED, {"verification": "coupled", "num_draft_tokens": "auto"}, SHORT_AND_LONG[::-1]
    ),
}


def meet(tag: int) -> None:
    """Fails unless the other rank is here for the same thing."""
    tags = torch.tensor(float(tag))
    distributed.all_reduce(tags)
    assert tags == RANKS * tag, f"the other rank does not run {tag}"


@contextmanager
def meeting(target: PreTrainedModel, draft: PreTrainedModel) -> Iterator[None]:
    """Both models meet the other rank before each forward."""
    tags = {target: TARGET, draft: DRAFT}
    if target.config.is_encoder_decoder:
        tags |= {target.get_encoder(): ENCODER, draft.get_encoder(): ENCODER}
    hooks = [model.register_forward_pre_hook(reads_only(lambda *_, tag=tag: meet(tag))) for model, tag in tags.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def models(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = zoo.build("seq2seq", "t5") if model_type == "t5" else tiny(model_type)
    return target, near(target, 0.25 if model_type == "t5" else 0.05)


def processors(case: Case) -> list[LogitsProcessor]:
    return [Counting()] if case.counting else []


def compare(name: str, rank: int, synced_gpus: bool) -> None:
    """Our text on each rank is stock's, in the same forwards on both, though one rank needs far fewer rounds."""
    case = CASES[name]
    target, draft = models(case.model_type)
    call = prompts(3 + rank * ("unequal" in name), seed=rank) | case.settings | case.of_rank[rank]
    torch.manual_seed(rank)
    expected = target.generate(**call, logits_processor=processors(case))
    drafter = PromptLookupCandidateGenerator(num_output_tokens=4, max_length=200) if case.lookup else draft
    options = {"num_draft_tokens": 3} | case.options | {"draft_model": drafter, "synced_gpus": synced_gpus}
    torch.manual_seed(rank)
    with meeting(target, draft):
        output = hf_specx.generate(
            model=target, **call, **options, logits_processor=processors(case), return_dict_in_generate=True
        )
    meet(DONE)
    assert torch.equal(output.sequences, expected), name
    if case.counting:
        assert output.speculation_report.layout == "plain"
        return
    rounds = torch.zeros(RANKS)
    rounds[rank] = output.speculation_report.rounds
    distributed.all_reduce(rounds)
    assert rounds.max() >= 2 * rounds.min() > 0, (name, rounds)
    assert output.past_key_values is None  # putting it together takes forwards, on some ranks more than on others


def compare_sharded(rank: int) -> None:
    """FSDP2 of both models, which a strategy notices by itself."""
    target, draft = models("llama")
    call = prompts(3, seed=rank) | SAMPLED | SHORT_AND_LONG[rank]
    torch.manual_seed(rank)
    expected = target.generate(**call)
    assert not synced_by_default(target, draft)
    mesh = init_device_mesh("cpu", (RANKS,))
    for model in (draft, target):
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
        assert synced_by_default(target, draft)  # after the draft alone, too
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification="coupled")
    torch.manual_seed(rank)
    assert torch.equal(target.generate(**call, custom_generate=strategy), expected)


def idle_without_drafting(run) -> None:
    run.target(run.batch, no_candidates(run.batch))


def drafts_left_out(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "dummy_round", idle_without_drafting)
        compare("sampled", rank, synced_gpus=True)


def compare_auto(name: str, rank: int, synced_gpus: bool) -> None:
    """Each rank finds its own times: a draft pays on the first, and none does on the other."""
    measure = Costs.measure

    def timed(costs: Costs, batch: int, *forwards: Any) -> None:
        measure(costs, batch, *forwards)
        costs.forward_times[batch] = {"target": {1: 1.0, 9: 9.0 if rank else 1.4}, "draft": 1.0 if rank else 0.1}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Costs, "measure", timed)
        patch.setattr(RoundTimer, "_ratios", lambda round_timer, rows: (1.0, 1.0))  # rounds really take otherwise
        patch.setattr(RoundTimer, "has_seen_plain", lambda round_timer, rows: True)
        compare(name, rank, synced_gpus)


def numbers_of_each_rank(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_run, "of_first_rank", lambda number, device: number)
        compare_auto("auto", rank, synced_gpus=True)


# both ranks notice at the same meeting, so that they are in step again afterwards
WRONG = {"not synced": partial(compare, "sampled", synced_gpus=False), "drafts left out": drafts_left_out}
WRONG["numbers of each rank"] = numbers_of_each_rank
RIGHT = {name: partial(compare_auto if "auto" in name else compare, name, synced_gpus=True) for name in CASES}
RIGHT["FSDP2"] = compare_sharded


def play(rank: int, results: dict[str, str]) -> None:
    for name, run in WRONG.items():
        try:
            run(rank=rank)
        except Exception:
            results[name] = traceback.format_exc()
    for name, run in RIGHT.items():
        run(rank=rank)
        results[name] = "passed"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What came of each case, on each rank."""
    return run_on_ranks(play, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", RIGHT)
def test_every_rank_gets_stocks_text(outcomes: list[dict[str, str]], name: str):
    for seen in outcomes:
        assert seen.get(name) == "passed", seen.get("error")


@pytest.mark.parametrize("name", WRONG)
def test_ranks_out_of_step_are_seen(outcomes: list[dict[str, str]], name: str):
    assert all("the other rank does not run" in seen[name] for seen in outcomes)
