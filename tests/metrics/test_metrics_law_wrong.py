"""sampled_law: samples that are not from the law are seen, each with a p-value below 1e-6; what is wrong shows where.

All seeds are fixed.
"""

import pytest
import torch
from law_samples import PLAIN, drawn, judge, pick, rejected, sampled, target
from tiny import VOCAB_SIZE, near, tiny
from transformers import GenerationConfig


def test_wrong_samples_are_seen():
    """`shifted`: the law of each token is taken a position too early. A temperature may be a tenth off."""
    right = sampled()
    wrong = {
        "greedy": sampled(do_sample=False),
        "drafted": sampled(model=near(target(), 0.3)),
        "shifted": right | {"predictions": [row[1:] for row in right["predictions"]]},
        "wrong prompt": right | {"references": [[1 + row[0] % 9, *row[1:]] for row in right["references"]]},
    }
    for name, rows in wrong.items():
        assert rejected(judge(rows)), name
    found = judge(right, generation_config=GenerationConfig(temperature=0.9, **PLAIN))
    assert (found["positions"], rejected(found)) == (2048, True)


def of_temperature(p: torch.Tensor, temperature: float) -> torch.Tensor:
    return (p.log() / temperature).softmax(-1)


@pytest.mark.parametrize(
    ("temperatures", "statistic"),
    [
        ((1.0,) * 12, None),
        ((0.6, *(1.0,) * 11), "surprisal_first"),  # a wrong first token among right ones
        ((0.8, 1.3) * 6, "surprisal_alternating"),  # errors that cancel
    ],
)
def test_errors_at_some_steps_are_seen_by_the_statistic_for_them(temperatures: tuple, statistic: str | None):
    found = judge(drawn(lambda p, step, u: pick(of_temperature(p, temperatures[step]), u), rows=256, steps=12))
    assert (found["passed"], rejected(found)) == (statistic is None, statistic is not None)
    z = {name: abs(known["z"]) for name, known in found["statistics"].items()}
    assert statistic is None or z[statistic] > max(6, 2 * z["surprisal"])


def test_noise_that_is_used_twice_is_seen():
    """Every second token is drawn by the uniform of the one before, so each by itself is right."""
    kept = []

    def choose(p, step, u):
        kept.append(u if step % 2 == 0 else kept[-1])
        return pick(p, kept[-1])

    found = judge(drawn(choose, rows=256, steps=12))
    assert rejected(found)
    below = {name for name, statistic in found["statistics"].items() if statistic["p_value"] < 1e-6}
    assert {"cdf_after", "top_1_after"} <= below
    assert not below & {"cdf", "surprisal", "top_1"}


def test_an_impossible_token_fails_whatever_the_rest():
    options = PLAIN | {"top_k": 8}
    rows = sampled(**options)
    found = judge(rows, generation_config=GenerationConfig(**options))
    assert found["passed"]
    with torch.no_grad():
        logits = target()(torch.tensor([rows["references"][5] + rows["predictions"][5][:-1]])).logits[0, -1]
    rows["predictions"][5][-1] = int(logits.argmin())
    found = judge(rows, generation_config=GenerationConfig(**options))
    assert (found["passed"], found["p_value"], found["impossible"]) == (False, 0.0, 1)
    assert all(statistic["p_value"] > 1e-4 for statistic in found["statistics"].values())


def test_tokens_on_the_edge_of_what_is_kept_are_told_from_impossible_ones():
    """By top-k 1 the second token is left out, unless its logit may be off by as much as lacks it."""
    prompts, config = [[3, 1, 4], [5, 6]], GenerationConfig(top_k=1)
    rows = {"references": prompts, "predictions": []}
    with torch.no_grad():
        logits = [target()(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    rows["predictions"] = [row.topk(2).indices[1:].tolist() for row in logits]
    top = [row.topk(2).values for row in logits]
    units = [
        float(a - b) / (torch.finfo(a.dtype).eps * float(row.abs().max()))
        for (a, b), row in zip(top, logits, strict=True)
    ]
    for rounding, impossible in ((0.0, 2), (0.99 * min(units), 2), (1.01 * min(units), 1), (1.01 * max(units), 0)):
        found = judge(rows, generation_config=config, rounding=rounding)
        assert (found["impossible"], found["on_the_edge"]) == (impossible, 2 - impossible)
        assert (found["passed"], found["p_value"]) == (not impossible, float(not impossible))


def test_tokens_of_the_draft_are_seen_best_where_the_draft_is_known():
    draft = near(target(), 0.3)
    with torch.no_grad():
        q = draft(torch.tensor([[3, 1, 4]])).logits[:, -1].double().softmax(-1)
    rows = drawn(lambda p, step, u: pick(0.2 * p + 0.8 * q, u), rows=250, steps=1)
    found = judge(rows, draft=draft)
    statistics = found["statistics"]
    assert rejected(found)
    assert min(statistics, key=lambda name: statistics[name]["p_value"]) == "overrated"
    right = judge(drawn(lambda p, step, u: pick(p, u), rows=250, steps=1), draft=draft)
    assert right["passed"]
    assert 0 < right["statistics"]["overrated"]["expected"] < 250
    smaller = judge(sampled(8), draft=tiny(vocab_size=VOCAB_SIZE - 5))  # it lacks some that are emitted
    assert smaller["passed"]
    assert smaller["statistics"]["overrated"]["expected"] > 0


def test_a_law_of_single_tokens_compares_nothing():
    found = judge(sampled(do_sample=False), generation_config=GenerationConfig(top_k=1))
    assert (found["passed"], found["comparisons"], found["p_value"], found["impossible"]) == (True, 0, 1.0, 0)


def test_rare_events_are_not_left_to_the_normal():
    """Near temperature 0 hardly anything varies: right samples pass, a few other tokens are seen."""
    cold = GenerationConfig(temperature=0.02, **PLAIN)
    rows = sampled(8, temperature=0.02)
    found = judge(rows, generation_config=cold)
    assert found["passed"]
    assert "surprisal" not in found["statistics"]
    for row in rows["predictions"][:6]:
        row[-1] = (row[-1] + 1) % VOCAB_SIZE
    assert rejected(judge(rows, generation_config=cold))
