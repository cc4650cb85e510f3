"""What tests of `sampled_law` share: samples of one random model, and judgements on them."""

from collections.abc import Callable
from functools import cache

import torch
from metric_modules import load
from tiny import prompts, tiny
from transformers import GenerationConfig, PreTrainedModel


PLAIN = {"top_k": 0}
NEW_TOKENS = 32
Choose = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]


@cache
def target() -> PreTrainedModel:
    return tiny(initializer_range=0.25)


def split(inputs: dict, out: torch.Tensor, end: int | None = None) -> dict[str, list]:
    """Rows as the metric takes them, from padded prompts and what `generate` returned."""
    width, texts = inputs["input_ids"].shape[1], out[:, inputs["input_ids"].shape[1] :].tolist()
    if end is not None:
        texts = [row[: row.index(end) + 1] if end in row else row for row in texts]
    given = [ids[mask > 0].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
    assert width == max(map(len, given))
    return {"predictions": texts, "references": given}


def sampled(rows: int = 64, seed: int = 0, model: PreTrainedModel | None = None, **settings) -> dict[str, list]:
    torch.manual_seed(seed)
    inputs, options = prompts(rows), {"do_sample": True, "max_new_tokens": NEW_TOKENS} | PLAIN | settings
    out = (model or target()).generate(**inputs, **options)
    return split(inputs, out, options.get("eos_token_id"))


@torch.no_grad()
def drawn(choose: Choose, rows: int, steps: int) -> dict[str, list]:
    """Sampled by hand from one prompt: `choose` gets the law p [rows, V], the step, and fresh uniforms [rows]."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[3, 1, 4]]).repeat(rows, 1)
    for step in range(steps):
        p = target()(ids).logits[:, -1].double().softmax(-1)
        token = choose(p, step, torch.rand(rows, generator=generator, dtype=torch.float64))
        ids = torch.cat([ids, token[:, None]], 1)
    return {"predictions": ids[:, 3:].tolist(), "references": ids[:, :3].tolist()}


def pick(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """By cumulated sums."""
    return (p.cumsum(-1) <= u[:, None] * p.sum(-1, keepdim=True)).sum(-1).clamp(max=p.shape[-1] - 1)


def judge(rows: dict[str, list], **options) -> dict:
    if "processors" not in options:
        options = {"generation_config": GenerationConfig(**PLAIN)} | options
    return load("sampled_law").compute(**rows, **{"model": target()} | options)


def rejected(found: dict) -> bool:
    return not found["passed"] and found["p_value"] < 1e-6
