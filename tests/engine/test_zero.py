"""ZeRO-3: DeepSpeed cuts the weights of both models over two processes, and each has the text of one alone."""

import datetime
import json
import os
import traceback
from pathlib import Path

import pytest
import torch
from tiny import near, prompts, tiny
from torch import distributed, multiprocessing
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


class Numbers:
    """Notes how many candidates each round had."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def observe(self, done):
        self.seen.append(max(done.draft.lengths))


def text(target: PreTrainedModel, draft: PreTrainedModel, name: str, rank: int) -> tuple[list[list[int]], list[int]]:
    """What a case gives on a rank, and the candidates of its rounds."""
    options, verification = CASES[name]
    strategy, numbers = SpeculativeDecoding(draft, verification=verification, costs=Costs(TABLE)), Numbers()
    strategy.listeners = (numbers,)
    torch.manual_seed(rank)
    options = options | {"max_new_tokens": LENGTHS[rank], "custom_generate": strategy}
    return target.generate(**prompts(3, seed=rank), **options).tolist(), numbers.seen


def play(rank: int, folder: str) -> None:
    """Run all cases on a rank, and leave what came of them in a file."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    import deepspeed  # it looks at the environment

    distributed.init_process_group("gloo", f"file://{folder}/store", datetime.timedelta(minutes=2), 2, rank)
    deepspeed.ops.__compatible_ops__.clear()  # one of these would be compiled first
    found: dict = {}
    try:
        target = tiny()
        models = [deepspeed.initialize(model=model, config=CONFIG)[0].module for model in (target, near(target, 0.1))]
        noticed = HfDeepSpeedConfig(CONFIG)  # as long as it lives, transformers knows of ZeRO-3
        found["held"] = sum(parameter.numel() for parameter in target.parameters())
        found["noticed"] = synced_by_default(target) and noticed.is_zero3()
        found |= {name: text(*models, name, rank) for name in CASES}
    except Exception:
        found["error"] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    os._exit(0)  # else the process may abort as it ends, by threads of gloo (pytorch#190489)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("zero")
    multiprocessing.spawn(play, (str(folder),), 2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_each_rank_has_the_text_of_one_process(outcomes: list[dict], name: str):
    assert all("error" not in seen for seen in outcomes), outcomes
    for rank, seen in enumerate(outcomes):
        assert seen["noticed"]
        assert seen["held"] == 0  # between forwards no rank holds a whole weight
        found, numbers = seen[name]
        assert max(numbers) > 1
        assert len(numbers) < LENGTHS[rank]
        target, options = tiny(), CASES[name][0] | {"max_new_tokens": LENGTHS[rank]}
        torch.manual_seed(rank)
        assert found == target.generate(**prompts(3, seed=rank), **options).tolist()
