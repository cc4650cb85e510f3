"""Whether tokens that the draft overrates come as often as they should.

The law of the target's tokens is tested by `sampled_law`, which does not know the draft. Most faults of a verifier
let too much or too little of the draft through. So each emitted token is also asked whether the draft gave it more
than the target did, q(x) > p(x): if all is right, the sum of p over such tokens is its chance, whatever came before.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from .check_equality import stock_processors
from .decoders import vocabulary
from .devices import execution_device


LEAST_VARIANCE = 10.0  # of the number of such tokens; below it a normal law says little


@torch.no_grad()
def overrated(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    options: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Count the emitted tokens that the draft overrates.

    Args:
        target, draft: decoders.
        options: of `generate`.
        prompts: ids of each row, without pads.
        texts: ids emitted there, up to and with the end token.

    Returns:
        "observed" and "expected" numbers, "z", its two-sided "p_value" by the normal law, and "positions"; z is 0 and
        p_value 1 where the number hardly varies.
    """
    observed, expected, variance = 0.0, 0.0, 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        p, q = laws(target, draft, options, prompt, text)
        above = q > p  # [n, V]
        chance = (p * above).sum(-1)
        tokens = torch.tensor(list(text), device=p.device)[:, None]
        observed += float(above.gather(1, tokens).sum())
        expected += float(chance.sum())
        variance += float((chance * (1 - chance)).sum())
    told = variance >= LEAST_VARIANCE
    z = (observed - expected) / math.sqrt(variance) if told else 0.0
    return {
        "observed": observed,
        "expected": expected,
        "z": z,
        "p_value": math.erfc(abs(z) / math.sqrt(2)),
        "positions": sum(map(len, texts)),
    }


def laws(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    options: dict[str, Any],
    prompt: Sequence[int],
    text: Sequence[int],
) -> list[torch.Tensor]:
    """p and q [n, V] float64 at each token of a text, after the processors that `generate` prepares for its prompt."""
    found: list[torch.Tensor] = []
    home = execution_device(target)
    for model in (target, draft):
        device = execution_device(model)
        ids = torch.tensor([[*prompt, *text]], device=device)
        limit = vocabulary(model) - 1  # a draft may lack what its target emits
        logits = model(input_ids=ids.clamp(max=limit), attention_mask=torch.ones_like(ids), use_cache=False).logits
        logits = logits[0, len(prompt) - 1 : -1].to(home, torch.float32)
        if found:
            surplus = found[0].shape[1] - logits.shape[1]
            logits = torch.nn.functional.pad(logits, (0, surplus), value=-torch.inf)
        ids = ids.to(home)
        processors = stock_processors(target, ids[:, : len(prompt)], options)
        rows = [processors(ids[:, : len(prompt) + i], logits[i : i + 1]) for i in range(len(text))]  # type: ignore[arg-type]
        found.append(torch.cat(rows).double().softmax(-1))
    return found
