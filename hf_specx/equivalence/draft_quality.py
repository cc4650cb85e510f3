"""Whether tokens that the draft overrates come as often as they should.

The distribution of the tokens is tested by `sampled_law`, which does not know the draft. Most faults of a verifier
let too much or too little of the draft through. So each emitted token is also asked whether the draft gave it more
than the target did, q(x) > p(x): if all is right, the sum of p over such tokens is its chance, whatever came before.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.architectures import vocabulary
from hf_specx.common.devices import execution_device
from hf_specx.common.tokenizers import same_tokens
from hf_specx.drafting.candidates import make_drafter
from hf_specx.pairs.pair import DraftTargetPair

from .equality import copied, prepared_processors


MOST = 1.0  # by which one token can move the number away from what is expected
PValue = Callable[[float, float, float, float], float | None]
LeastExcess = Callable[[float, float, float, float], float]


def law_of(pair: DraftTargetPair) -> PreTrainedModel | None:
    """The model that gives candidates their distribution over the target's tokens; None where none does.

    That of a draft with another tokenizer is over tokens of its own.
    """
    return make_drafter(pair.draft, pair.target).model if same_tokens(pair.tokenizer, pair.draft_tokenizer) else None


@torch.no_grad()
def overrated(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    options: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> dict[str, float]:
    """Count the emitted tokens that the draft overrates.

    Args:
        target, draft: decoders.
        options: of `generate`.
        prompts: ids of each row, without pads.
        texts: ids emitted there, up to and including the end token.

    Returns:
        "observed" and "expected" numbers, "variance" and "third" (sum of E|f - E f|^3) of the observed, "positions".
    """
    found = dict.fromkeys(("observed", "expected", "variance", "third"), 0.0)
    for prompt, text in zip(prompts, texts, strict=True):
        p, q = distributions(target, draft, options, prompt, text)
        above = q > p  # [n, V]
        chance = (p * above).sum(-1).clamp(max=1)
        tokens = torch.tensor(list(text), device=p.device)[:, None]
        variance = chance * (1 - chance)
        found["observed"] += float(above.gather(1, tokens).sum())
        found["expected"] += float(chance.sum())
        found["variance"] += float(variance.sum())
        found["third"] += float((variance * (chance**2 + (1 - chance) ** 2)).sum())
    return found | {"positions": sum(map(len, texts))}


def judged(sums: dict[str, float], level: float, p_value: PValue, least_excess: LeastExcess) -> dict[str, Any]:
    """What the sums of `overrated` say.

    Args:
        level: probability of a false alarm.
        p_value, least_excess: of `sampled_law`, for sums of the same kind.

    Returns:
        "observed", "expected", "positions", "level", "z", "standard_error" of the observed, "p_value" (None where
        nothing could be otherwise), "passed", and "limit": the least |observed - expected| that does not pass.
    """
    excess, moments = sums["observed"] - sums["expected"], (sums["variance"], sums["third"], MOST)
    error, chance = math.sqrt(sums["variance"]), p_value(abs(excess), *moments)
    return {name: sums[name] for name in ("observed", "expected", "positions")} | {
        "z": excess / error if error else 0.0,
        "standard_error": error,
        "p_value": chance,
        "level": level,
        "limit": least_excess(level, *moments),
        "passed": chance is None or chance >= level,
    }


def distributions(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    options: dict[str, Any],
    prompt: Sequence[int],
    text: Sequence[int],
) -> list[torch.Tensor]:
    """p and q [n, V] float64 at each token of a text, after the processors that `generate` prepares for its prompt."""
    found: list[torch.Tensor] = []
    home = execution_device(target)
    prepared = prepared_processors(target, torch.tensor([list(prompt)], device=home), options)
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
        processors = copied(prepared, target)
        rows = [processors(ids[:, : len(prompt) + i], logits[i : i + 1]) for i in range(len(text))]  # type: ignore[arg-type]
        found.append(torch.cat(rows).double().softmax(-1))
    return found
