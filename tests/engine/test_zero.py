"""ZeRO-3: DeepSpeed cuts the weights of both models over two processes, and each has the text of one alone."""

import os

import pytest
import torch
from forking import run_on_ranks
from rounds import numbers
from tiny import near, prompts, tiny
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from hf_specx import SpeculativeDecoding
from hf_specx.drafting.costs import Costs
from hf_specx.engine.ranks import synced_by_default


pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

CONFIG = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
SAMPLED = GREEDY | {"do_sample": True, "top_k": 0}
CASES = {"greedy": (GREEDY, None), "coupled": (SAMPLED, "coupled")}
LENGTHS = (12, 40)  # of the new text on each rank
TABLE = {3: {"target": {1: 1.0, 9: 1.4}, "draft": 0.1}}  # seconds for "auto", with which drafting pays


def text(target: PreTrainedModel, draft: PreTrainedModel, name: str, rank: int) -> tuple[list[list[int]], list[int]]:
    """What a case gives on a rank, and the candidates of its rounds."""
    options, verification = CASES[name]
    strategy = SpeculativeDecoding(draft, verification=verification, costs=Costs(TABLE))
    strategy.listeners = (seen := numbers(),)
    torch.manual_seed(rank)
    options = options | {"max_new_tokens": LENGTHS[rank], "custom_generate": strategy}
    return target.generate(**prompts(3, seed=rank), **options).tolist(), seen


def play(rank: int, results: dict) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # it looks at the environment

    deepspeed.ops.__compatible_ops__.clear()  # one of these would be compiled first
    target = tiny()
    models = [deepspeed.initialize(model=model, config=CONFIG)[0].module for model in (target, near(target, 0.1))]
    noticed = HfDeepSpeedConfig(CONFIG)  # as long as it lives, transformers knows of ZeRO-3
    results["held"] = sum(parameter.numel() for parameter in target.parameters())
    results["noticed"] = synced_by_default(target) and noticed.is_zero3()
    results |= {name: text(*models, name, rank) for name in CASES}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_on_ranks(play, tmp_path_factory.mktemp("zero"))


@pytest.mark.parametrize("name", CASES)
def test_each_rank_has_the_text_of_one_process(outcomes: list[dict], name: str):
    assert all("error" not in seen for seen in outcomes), outcomes
    for rank, seen in enumerate(outcomes):
        assert seen["noticed"]
        assert seen["held"] == 0  # between forwards no rank holds a whole weight
        results, numbers = seen[name]
        assert max(numbers) > 1
        assert len(numbers) < LENGTHS[rank]
        target, options = tiny(), CASES[name][0] | {"max_new_tokens": LENGTHS[rank]}
        torch.manual_seed(rank)
        assert results == target.generate(**prompts(3, seed=rank), **options).tolist()
