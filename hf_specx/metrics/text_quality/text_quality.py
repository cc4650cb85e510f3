"""Quality of texts compared with paired texts: perplexity, variety, length, ROUGE, exact match, with intervals."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


DESCRIPTION = "Quality of texts compared with paired texts, with confidence intervals of the differences."
INPUTS = """
Each measure is a mean over texts, so the two texts of a row (of one prompt, say) can be paired. The interval of the
difference is a percentile bootstrap over rows, drawn in pairs. Unlike Student's t it also suits perplexity, which is
the exponential of a mean, and means of zeros and ones. With fewer than about 30 rows it is too narrow.

Args:
    predictions: texts.
    references: as many texts to compare with, each from the same prompt as its prediction.
    prompts: one for each row, which its texts continue; None if there are none.
    model: for perplexity, a PreTrainedModel (decoder only) or a path; None leaves perplexity out.
    tokenizer: of the model, or a path; None is the one at the model's path. Without a tokenizer words are counted
        instead of tokens.
    targets: one right text for each row, for ROUGE and exact match; None leaves these out.
    level: 1 - level is the confidence of each interval; above 0 and below 1, 0.05 unless given.
    seed: of the bootstrap, 0 unless given.
    extra: names or paths for `evaluate.load`, of metrics that compare a text with a target; each is computed text by
        text. Names on the Hub need a network.

Returns:
    For each measure `prediction`, `reference`, `difference` (prediction - reference) and its `interval` [low, high],
    and `prediction_interval` and `reference_interval`, of each mean by itself.
    perplexity: exp of the mean over texts of -log p per token after the prompt; rows with an empty text are left out.
    distinct_1, distinct_2: share of distinct n-grams among those of a text; 0 if it has none.
    length: tokens of a text, or words.
    rouge1, rougeL: F-measure, 0 to 1 (`rouge_score`, without stemming).
    exact_match: whether the text is its target, character for character.
    A metric of `extra` has its own name; if it gives several numbers, they are called name_key.

Raises:
    ValueError: fewer than two rows; prompts, targets or a tokenizer that do not fit; an extra that is not found.
    ImportError: targets are given, and `rouge_score` is not installed.

Example:
    >>> text_quality.compute(predictions=["a b", "a a"], references=["a b", "b a"])["distinct_1"]["interval"]
    [-0.5, 0.0]
"""
CITATION = """@book{efron1993bootstrap,
  title={An Introduction to the Bootstrap},
  author={Efron, Bradley and Tibshirani, Robert J.},
  publisher={Chapman and Hall},
  year={1993}
}"""

RESAMPLES = 2000
Measure = Callable[[str], float]
Score = Callable[[str, str], float]  # of a text and its target


class TextQuality(evaluate.Metric):
    """See `INPUTS`."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(
        self,
        predictions: list[str],
        references: list[str],
        prompts: Sequence[str] | None = None,
        model: PreTrainedModel | str | Path | None = None,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        targets: Sequence[str] | None = None,
        level: float = 0.05,
        seed: int = 0,
        extra: Sequence[str] | None = None,
    ) -> dict[str, dict[str, object]]:
        _check(len(predictions), prompts, model, tokenizer, targets, level, extra)
        scores = rouge_scores() | {"exact_match": lambda text, target: float(text == target)} if targets else {}
        others = [loaded(name) for name in extra or ()]
        judge: Any = AutoModelForCausalLM.from_pretrained(model) if isinstance(model, (str, Path)) else model
        reader: Any = model if tokenizer is None and isinstance(model, (str, Path)) else tokenizer
        reader = AutoTokenizer.from_pretrained(reader) if isinstance(reader, (str, Path)) else reader
        split = _words if reader is None else _tokens(reader)
        pairs = (predictions, references)
        values = {name: each(measure, pairs) for name, measure in surfaces(split).items()}
        values |= {name: against(score, pairs, targets or ()) for name, score in scores.items()}
        for metric in others:
            values |= by_text(metric, pairs, targets or ())
        found = {name: compared(*pair, level, seed) for name, pair in values.items()}
        if model is None:
            return found
        prefixes = [_prefix(reader, prompt) for prompt in prompts or [""] * len(predictions)]
        return {"perplexity": perplexity(judge, prefixes, pairs, split, level, seed)} | found


def surfaces(split: Callable[[str], Sequence[Any]]) -> dict[str, Measure]:
    """The measures of a text alone, by name; `split` makes tokens or words of it."""

    def distinct(text: str, n: int) -> float:
        parts = split(text)
        grams = list(zip(*(parts[i:] for i in range(n)), strict=False))
        return len(set(grams)) / len(grams) if grams else 0.0

    return {
        "distinct_1": lambda text: distinct(text, 1),
        "distinct_2": lambda text: distinct(text, 2),
        "length": lambda text: float(len(split(text))),
    }


def each(measure: Measure, pairs: tuple[list[str], list[str]]) -> tuple[np.ndarray, np.ndarray]:
    """The measure of each text: [rows] of predictions and of references."""
    left, right = (np.array([measure(text) for text in texts], dtype=np.float64) for texts in pairs)
    return left, right


def against(score: Score, pairs: tuple[list[str], list[str]], targets: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The score of each text with its target: [rows] of predictions and of references."""
    left, right = (np.array([score(*row) for row in zip(texts, targets, strict=True)], float) for texts in pairs)
    return left, right


def compared(
    left: np.ndarray,
    right: np.ndarray,
    level: float,
    seed: int,
    shown: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> dict[str, object]:
    """Means of two paired columns [rows], their difference, and intervals; `shown` is applied to each mean."""
    rows = len(left)
    counts = np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES)
    ours, theirs = (shown(counts @ column / rows) for column in (left, right))  # [RESAMPLES]
    prediction, reference = float(shown(left.mean())), float(shown(right.mean()))

    def interval(drawn: np.ndarray) -> list[float]:
        return [float(end) for end in np.quantile(drawn, [level / 2, 1 - level / 2])]

    return {
        "prediction": prediction,
        "reference": reference,
        "difference": prediction - reference,
        "interval": interval(ours - theirs),
        "prediction_interval": interval(ours),
        "reference_interval": interval(theirs),
    }


def perplexity(
    model: PreTrainedModel,
    prefixes: list[list[int]],
    pairs: tuple[list[str], list[str]],
    split: Callable[[str], Sequence[Any]],
    level: float,
    seed: int,
) -> dict[str, object]:
    """Perplexity of texts after prefixes of ids; rows with a text without tokens are left out."""
    rows = [(prefix, split(a), split(b)) for prefix, a, b in zip(prefixes, *pairs, strict=True)]
    rows = [row for row in rows if row[1] and row[2]]
    if not rows:
        raise ValueError("in each pair one text has no tokens, so there is no perplexity; leave out the model.")
    with torch.no_grad(), evaluating(model):
        losses = np.array([[_loss(model, prefix, text) for text in texts] for prefix, *texts in rows])
    return compared(losses[:, 0], losses[:, 1], level, seed, shown=np.exp)


def _loss(model: PreTrainedModel, prefix: list[int], text: Sequence[int]) -> float:
    """Mean -log p of the tokens of a text after a prefix."""
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    ids = torch.tensor([[*prefix, *text]], device=device)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    log_p = logits[0, len(prefix) - 1 : -1].double().log_softmax(-1)
    return float(-log_p.gather(1, ids[0, len(prefix) :, None].to(log_p.device)).mean())


def by_text(
    metric: evaluate.EvaluationModule, pairs: tuple[list[str], list[str]], targets: Sequence[str]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The numbers of a metric, text by text."""
    rows = [[_numbers(metric, *row) for row in zip(texts, targets, strict=True)] for texts in pairs]
    keys = list(rows[0][0])
    names = {key: metric.name if len(keys) == 1 else f"{metric.name}_{key}" for key in keys}
    return {names[key]: (_column(rows[0], key), _column(rows[1], key)) for key in keys}


def _column(rows: list[dict[str, float]], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows], dtype=np.float64)


def _numbers(metric: evaluate.EvaluationModule, text: str, target: str) -> dict[str, float]:
    found = metric.compute(predictions=[text], references=[target])
    return {key: float(value) for key, value in found.items() if isinstance(value, (int, float, np.number))}


def loaded(name: str) -> evaluate.EvaluationModule:
    """A metric by name or path."""
    try:
        return evaluate.load(name)
    except (FileNotFoundError, ConnectionError) as error:
        raise ValueError(f"extra={name!r} is not found; give a path, or a name on the Hub and a network.") from error


def rouge_scores() -> dict[str, Score]:
    """F-measures."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        message = "targets are compared by ROUGE; install it (pip install rouge_score), or leave out the targets."
        raise ImportError(message) from error

    def scored(name: str) -> Score:
        scorer = RougeScorer([name])
        return lambda text, target: float(scorer.score(target, text)[name].fmeasure)

    return {name: scored(name) for name in ("rouge1", "rougeL")}


def _words(text: str) -> list[str]:
    return text.split()


def _tokens(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def _prefix(tokenizer: Any, prompt: str) -> list[int]:
    """The ids before a text: those of the prompt, or without one the tokenizer's start or end token."""
    ids = tokenizer(prompt)["input_ids"] if prompt else []
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not ids and start is None:
        raise ValueError("a text without prompt has nothing before its first token; give prompts.")
    return list(ids) or [start]


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put all modules into evaluation mode, and each back into its own afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check(
    rows: int, prompts: Any, model: Any, tokenizer: Any, targets: Any, level: float, extra: Sequence[str] | None
) -> None:
    if rows < 2:
        raise ValueError(f"{rows} rows have no interval; give two at least.")
    if not 0 < level < 1:
        raise ValueError(f"level={level} leaves no confidence; give one above 0 and below 1.")
    for name, given in (("prompts", prompts), ("targets", targets)):
        if given is not None and len(given) != rows:
            raise ValueError(f"{name} has {len(given)} texts for {rows} rows; give one for each.")
    if model is None and prompts is not None:
        raise ValueError("prompts are read by a model; pass model and tokenizer, or leave them out.")
    if model is not None and not isinstance(model, (str, Path)):
        if tokenizer is None:
            raise ValueError("model cannot read text; pass its tokenizer.")
        if model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} has an encoder; give a decoder to judge texts by.")
    if extra and targets is None:
        raise ValueError(f"extra={list(extra)} compares texts with targets; give targets.")
