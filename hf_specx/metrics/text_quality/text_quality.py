"""Quality of texts compared with paired texts: perplexity, variety and length, with intervals."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from scipy import stats
from transformers import PreTrainedModel, PreTrainedTokenizerBase


DESCRIPTION = "Quality of texts compared with paired texts, with confidence intervals of the differences."
INPUTS = """
Each measure is a mean over texts, so the two texts of a row (of one prompt, say) can be paired. The interval of the
difference is a percentile bootstrap over rows, drawn in pairs. Unlike Student's t it also suits perplexity, which is
the exponential of a mean, and means of zeros and ones. With fewer than about 30 rows it is too narrow.

Args:
    predictions: texts.
    references: as many texts to compare with, each from the same prompt as its prediction.
    prompts: one for each row, which its texts continue; None if there are none.
    model: for perplexity, a PreTrainedModel, a decoder in evaluation mode; None leaves perplexity out.
    tokenizer: of the model. Without one words are counted instead of tokens.
    lengths: of the texts, [predictions, references], where they are known otherwise, such as tokens that were emitted.
    level: 1 - level is the confidence of each interval; above 0 and below 1, 0.05 unless given.
    seed: of the bootstrap, 0 unless given.

Returns:
    For each measure `prediction`, `reference`, `difference` (prediction - reference), its `interval` [low, high], and
        `p_value`, of Student's paired t-test.
    perplexity: exp of the mean over texts of -log p per token after the prompt (of which the p-value is); rows with an
        empty text are left out. Prompt and text are tokenized apart.
    distinct_1, distinct_2: share of distinct n-grams among those of a text; 0 if it has none.
    length: tokens of a text, or words.

Raises:
    ValueError: fewer than two rows; arguments that do not fit each other.

Example:
    >>> text_quality.compute(predictions=["a b", "a a"], references=["a b", "b a"])["distinct_1"]["interval"]
    [-0.5, 0.0]
"""
RESAMPLES = 2000
Pair = Sequence[Sequence[Any]]  # of predictions and of references, by row


class TextQuality(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": text})
        return evaluate.MetricInfo(description=DESCRIPTION, citation="", inputs_description=INPUTS, features=features)

    def _compute(
        self,
        predictions: list[str],
        references: list[str],
        prompts: Sequence[str] | None = None,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        lengths: Pair | None = None,
        level: float = 0.05,
        seed: int = 0,
    ) -> dict[str, dict[str, object]]:
        _check(len(predictions), prompts, model, tokenizer, level)
        tokens = [[_tokens(text, tokenizer) for text in texts] for texts in (predictions, references)]
        columns: dict[str, Pair] = {
            f"distinct_{n}": [[_distinct(text, n) for text in texts] for texts in tokens] for n in (1, 2)
        }
        columns["length"] = lengths or [[len(text) for text in texts] for texts in tokens]
        measures = {name: _compared(pair, level, seed) for name, pair in columns.items()}
        if model is None:
            return measures
        prefixes = [_prefix(tokenizer, prompt) for prompt in prompts or [""] * len(predictions)]
        rows = [row for row in zip(prefixes, *tokens, strict=True) if row[1] and row[2]]
        if len(rows) < 2:
            raise ValueError("of less than two pairs both texts have tokens; leave out the model.")
        losses = [[_loss(model, row[0], row[side]) for row in rows] for side in (1, 2)]
        return {"perplexity": _compared(losses, level, seed, transform=np.exp)} | measures


def _compared(
    pair: Pair, level: float, seed: int, transform: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> dict[str, object]:
    """Means of two paired columns, their difference, and intervals; `transform` is applied to each mean."""
    left, right = np.array(pair, dtype=np.float64)  # [rows]
    rows, difference = len(left), left - right
    counts = np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES)
    drawn_left, drawn_right = (transform(counts @ column / rows) for column in (left, right))  # [RESAMPLES]
    low, high = np.quantile(drawn_left - drawn_right, [level / 2, 1 - level / 2])
    prediction, reference = float(transform(left.mean())), float(transform(right.mean()))
    error, mean = float(difference.std(ddof=1)) / math.sqrt(rows), abs(float(difference.mean()))
    t = mean / error if error else math.inf
    if mean == 0:
        t = 0.0
    return {
        "prediction": prediction,
        "reference": reference,
        "difference": prediction - reference,
        "interval": [float(low), float(high)],
        "p_value": float(2 * stats.t.sf(t, rows - 1)),
    }


def _tokens(text: str, tokenizer: Any) -> list[Any]:
    """The ids of a text, or without a tokenizer its words."""
    return text.split() if tokenizer is None else tokenizer(text, add_special_tokens=False)["input_ids"]


def _distinct(tokens: list[Any], n: int) -> float:
    """The share of distinct n-grams."""
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else 0.0


def _prefix(tokenizer: Any, prompt: str) -> list[int]:
    """The ids before a text: those of the prompt, or without one the tokenizer's start or end token."""
    ids = tokenizer(prompt)["input_ids"] if prompt else []
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not ids and start is None:
        raise ValueError("a text without prompt has nothing before its first token; give prompts.")
    return list(ids) or [start]


@torch.no_grad()
def _loss(model: PreTrainedModel, prefix: list[int], text: Sequence[int]) -> float:
    """Mean -log p of the tokens of a text after a prefix."""
    device = torch.device("cpu") if model.device.type == "meta" else model.device  # of weights that are offloaded
    ids = torch.tensor([[*prefix, *text]], device=device)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    log_p = logits[0, len(prefix) - 1 : -1].double().log_softmax(-1)
    return float(-log_p.gather(1, ids[0, len(prefix) :, None].to(log_p.device)).mean())


def _check(rows: int, prompts: Any, model: Any, tokenizer: Any, level: float) -> None:
    """Raise a ValueError for arguments that do not fit each other."""
    if rows < 2:
        raise ValueError(f"{rows} rows have no interval; give two at least.")
    if not 0 < level < 1:
        raise ValueError(f"level={level} leaves no confidence; give one above 0 and below 1.")
    if prompts is not None and len(prompts) != rows:
        raise ValueError(f"prompts has {len(prompts)} texts for {rows} rows; give one for each.")
    if model is None and prompts is not None:
        raise ValueError("prompts are read by a model; pass model and tokenizer, or leave them out.")
    if model is not None and tokenizer is None:
        raise ValueError("model cannot read text; pass its tokenizer.")
    if model is not None and (model.config.is_encoder_decoder or model.training):
        raise ValueError(f"{type(model).__name__} must be a decoder in evaluation mode to judge texts.")
