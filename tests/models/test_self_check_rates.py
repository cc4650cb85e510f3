"""How often the self-check takes a right target for a wrong one, and the other way round, in each precision.

`pytest -s -m slow tests/models/test_self_check_rates.py` prints the table of hf_specx/models/README.md.
"""

import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from tiny import prompts, tiny
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from unheard import RIGHT, WRONG, unheard_of

from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.common.architectures import LAYOUTS_OF, WINDOW_IN_CACHE
from hf_specx.models.foreign_code import untested_traits
from hf_specx.models.self_check import RESULTS, STEPS, Difference


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEEDS = range(10)
OTHER_KEYS = ("input_ids", "attention_mask")
SMALL = {"int8", "scores_depend_on_rows"}  # faults that move hardly more than half precision rounds


def measured(target: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Difference:
    """What the check of the layout that it tried last has found."""
    draft = tiny(seed=1, vocab_size=target.config.get_text_config(decoder=True).vocab_size)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=4)
    target.generate(**inputs, do_sample=False, max_new_tokens=STEPS + 1, custom_generate=strategy)
    return list(RESULTS[target].values())[-1]


def random_prompts(seed: int) -> dict[str, torch.Tensor]:
    """One to three prompts of 8 to 24 tokens."""
    return prompts(1 + seed % 3, width=8 + (5 * seed) % 17, seed=seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_targets_are_seen(dtype: torch.dtype):
    """None is let through, but for small faults in half precision; what rows do to each other needs several."""
    seen: Counter[str] = Counter()
    checks: Counter[str] = Counter()
    for name, build in WRONG.items():
        for seed in SEEDS:
            inputs = random_prompts(seed)
            if name == "scores_depend_on_rows" and len(inputs["input_ids"]) == 1:
                continue
            checks[name] += 1
            seen[name] += not measured(build(seed).to(dtype), inputs).is_rounding
    print(f"\n{dtype}: seen", {name: f"{seen[name]} of {number}" for name, number in checks.items()})
    missed = {name for name, number in checks.items() if seen[name] < number}
    assert missed <= (set() if dtype == torch.float32 else SMALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_targets_are_let_through(dtype: torch.dtype):
    """None of these is taken for wrong: copies of registered types, and the pair in the package with a hook."""
    figures: dict[str, list[Any]] = {}
    for model_type, (_, settings) in RIGHT.items():
        for seed in SEEDS:
            target = unheard_of(tiny(model_type, seed=seed, **settings)).to(dtype)
            figures.setdefault("tiny", []).append(measured(target, random_prompts(seed)))
    for kind, model_type in zoo.model_types()[::4]:
        if kind != "causal" or not LAYOUTS_OF.get(model_type) or model_type in WINDOW_IN_CACHE:
            continue  # these are not right, or read prompts in another way than they may be fed anew
        try:
            target = unheard_of(zoo.build(kind, model_type)).to(dtype)
            inputs = {name: zoo.inputs(target)[name] for name in OTHER_KEYS}
            target.generate(**inputs, do_sample=False, max_new_tokens=3)
        except Exception:  # plain `generate` cannot run it in this precision either
            continue
        if not untested_traits(target):  # the config that counts has another class
            continue
        figures.setdefault("registered types", []).append(measured(target, inputs))
    pair = DraftTargetPair.embedded()
    target = pair.target.to(dtype)
    ids = pair.tokenizer(Path(torch.__file__).read_text(encoding="utf-8")).input_ids
    target.register_forward_hook(lambda *_: None)
    for number in range(100):
        RESULTS.pop(target, None)
        rows = [ids[60 * number + 20 * row :][: 16 + number] for row in range(1 + number % 4)]
        ids_of_rows = torch.tensor(rows)
        inputs = {"input_ids": ids_of_rows, "attention_mask": torch.ones_like(ids_of_rows)}
        strategy = SpeculativeDecoding(pair.draft, num_draft_tokens=4)
        target.generate(**inputs, do_sample=False, max_new_tokens=STEPS + 1, custom_generate=strategy)
        figures.setdefault("embedded", []).append(list(RESULTS[target].values())[-1])
    for name, differences in figures.items():
        alarms = sum(not difference.is_rounding for difference in differences)
        largest = max(difference.value for difference in differences)
        nearest = max(difference.value / difference.limit for difference in differences)
        print(f"\n{dtype}, {name}: {alarms} of {len(differences)}, largest {largest:.2g}, {nearest:.2g} of its limit")
        assert alarms == 0


def llama_160m() -> PreTrainedModel:
    """A random model of 160M parameters."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes)).eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["embedded", "160M"])
def test_what_it_costs(name: str, dtype: torch.dtype):
    """Prints how many steps of plain `generate` a first call takes more than the next one; on an idle machine."""
    target = (DraftTargetPair.embedded().target if name == "embedded" else llama_160m()).to(dtype)
    draft = tiny(seed=1, vocab_size=target.config.vocab_size)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=4)
    ids = torch.randint(100, 200, (1, 32), generator=torch.Generator().manual_seed(0))
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}

    def seconds(**options: Any) -> float:
        begun = time.perf_counter()
        target.generate(**call, **options)
        return time.perf_counter() - begun

    figures = []
    target.register_forward_hook(lambda *_: None)
    for _ in range(9):
        step = (seconds(max_new_tokens=21) - seconds(max_new_tokens=1)) / 20
        RESULTS.pop(target, None)
        first, second = (seconds(max_new_tokens=8, custom_generate=strategy) for _ in range(2))
        figures.append((first - second) / step)
    print(
        f"\n{name}, {dtype}: {statistics.median(figures):.1f} plain steps ({min(figures):.1f} to {max(figures):.1f})"
    )
