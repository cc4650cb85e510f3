"""`check`: test on a pair and its prompts that speculative text is plain text, by modules of `evaluate`."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import tqdm
from transformers import GenerationConfig

from hf_specx.bench.inputs import generation_settings
from hf_specx.bench.store import Store, provenance
from hf_specx.bench.timer import Advance
from hf_specx.bench.trace import trace
from hf_specx.common.drafts import FIXED_DRAFT_TOKENS
from hf_specx.common.errors import brief, require
from hf_specx.common.fingerprint import digest_of
from hf_specx.common.wrappers import label_of
from hf_specx.hub.flatten import PACKAGE
from hf_specx.hub.folders import without_folders
from hf_specx.metrics import path as path_of
from hf_specx.pairs.fingerprint import arguments_of
from hf_specx.pairs.pair import DraftTargetPair

from .equality import Gaps, Noise, Reference, Rounding, gaps_of, rounding_scale
from .page import check_can_write, page
from .result import CheckResult, lines_of
from .settings import CHECKED, UNITS, Settings, check_packages, is_greedy, plain_of
from .texts import Subject, generate_texts


SHOWN_TEXTS = 4  # by each method, that a result has
CONFIDENCE = 0.95  # of intervals
NUM_MEASURES = 4  # of quality
GetPart = Callable[..., Any]  # a part by its name: stored, or computed by a function of a subject and more
Texts = dict[tuple[str, int], dict[str, Any]]  # by method to generate and batch size


def check(
    pair: DraftTargetPair,
    prompts: Sequence[str] | None = None,
    *,
    batch_sizes: Sequence[int] = (1, 8),
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    verifications: Sequence[str] = CHECKED,
    samples: int | None = None,
    num_draft_tokens: int = FIXED_DRAFT_TOKENS,
    seed: int = 0,
    level: float = 0.001,
    advance: Advance | None = None,
    path: str | Path | None = None,
    report: str | Path | None = None,
    **options: Any,
) -> CheckResult:
    """Compare speculative with plain generation: the same tokens, the same distribution, the same quality.

    It needs `evaluate`, `datasets` and `scipy`, and leaves the default generators as they were.

    Args:
        pair: in its own precision, with the layout of `pair.strategy`.
        prompts: texts; None is the pair's own.
        batch_sizes, ..., level: as in `Settings`; how to generate, else as the target's own generation config says.
        advance: called after each of `Settings(...).steps` parts; else there is a bar.
        path: of a file that gets each part as soon as it is known, and from which an interrupted check goes on.
        report: of a page (.html) to write.
        **options: what `generate` is given besides, plain and speculative alike; values that JSON has.

    Raises:
        ValueError: for what cannot be checked, before the first token of ours.

    Example:
        >>> hf_specx.check(pair, prompts, batch_sizes=(2,), max_new_tokens=8).passed
        True
    """
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    more: dict[str, Any] = {"samples": samples, "num_draft_tokens": num_draft_tokens, "seed": seed, "level": level}
    settings = Settings(tuple(batch_sizes), verifications=tuple(verifications), options=options, **more)
    check_can_write(report)
    subject = subject_of(pair, prompts, settings, sampling)
    with tqdm(total=settings.steps, delay=3, desc="checking", disable=advance is not None) as bar:
        result = run_check(subject, advance or bar.update, path)
    result.pair = without_folders(" with ".join(map(label_of, (pair.target, *pair.drafts))))
    if report is not None:
        Path(report).write_text(page(result), encoding="utf-8")
    return result


def subject_of(pair: DraftTargetPair, prompts: Any, settings: Settings, options: dict[str, Any]) -> Subject:
    """The `Subject` of a check; a ValueError for what cannot be checked.

    `options` are arguments of `generate`; None is as the target's generation config says.
    """
    check_packages()
    require(
        isinstance(pair, DraftTargetPair),
        f"pair={pair!r} is no DraftTargetPair; load it, as by DraftTargetPair.from_pretrained(name).",
    )
    prompts = prompts if isinstance(prompts, str) else list(pair.prompts if prompts is None else prompts)
    require(
        not pair.target.config.is_encoder_decoder,
        "the pair is of encoder-decoders, whose distributions a check does not know; compare greedy texts yourself.",
    )
    require(
        pair.tokenizer is not None,
        "the pair has no tokenizer to read prompts with; DraftTargetPair(target, draft, tokenizer) gives it one.",
    )
    are_texts = prompts and not isinstance(prompts, str) and all(isinstance(text, str) for text in prompts)
    require(
        bool(are_texts),
        f"prompts={brief(prompts)}: give a list of texts; without it the pair's own are taken, if it has any.",
    )
    options = {name: value for name, value in options.items() if value is not None}
    sampling = generation_settings(pair.target, {"do_sample": True} | options, settings.max_new_tokens)
    sampling.pop("do_sample")  # some of what is checked is greedy
    subject = Subject(pair, prompts, replace(settings, **sampling))
    subject.encoded(list(range(len(prompts))))  # raises for prompts that are empty or too long
    return subject


def run_check(subject: Subject, advance: Advance, path: str | Path | None = None) -> CheckResult:
    """Run a check on a subject made by `subject_of`; returns its result."""
    code = digest_of(file.read_bytes() for file in sorted(PACKAGE.rglob("*.py")))
    where = provenance(subject.target) | described(subject.pair) | {"code": code}
    store = Store(None if path is None else Path(path), "check", where | {"asked": digest_of_subject(subject)})

    def get_part(name: str, compute: Callable[..., Any], *args: Any) -> Any:
        value = store.get_or_compute(name, partial(compute, subject, *args))
        advance()
        return value

    accelerator = torch.accelerator.current_accelerator()
    devices = range(torch.accelerator.device_count())  # all of them are seeded by `torch.manual_seed`
    with torch.random.fork_rng(devices, device_type="cuda" if accelerator is None else accelerator.type):
        texts = {
            (method, batch): get_part(f"texts, {method}, batch {batch}", generate_texts, method, batch)
            for batch in subject.settings.batch_sizes
            for method in subject.settings.methods
        }
        cells = all_cells(subject, get_part, texts)
        traced = get_part("trace", trace_one)
    first_size = subject.settings.batch_sizes[0]
    shown = {}
    for method in subject.settings.methods:
        indices = subject.prompt_indices(method, first_size)
        pairs = zip(indices, texts[method, first_size]["texts"][:SHOWN_TEXTS], strict=False)
        shown[method] = [{"prompt": index, "text": subject.decoded([text])[0]} for index, text in pairs]
    lines = lines_of(subject.settings, cells)
    return CheckResult(lines, subject.settings.to_dict(), where, subject.prompts, cells, shown, traced)


def digest_of_subject(subject: Subject) -> str:
    """A digest that differs for other settings, prompts, models, drafts or tokenizers."""
    pair, settings = subject.pair, subject.settings
    arguments = {
        "prompts": subject.prompts,
        "ids": subject.prompt_ids,
        "tokenizers": [pair.tokenizer, pair.draft_tokenizer],
        "layout": pair.strategy.layout,
        "compile": pair.strategy.compile,
        **settings.to_dict(),
    }
    return digest_of([json.dumps(arguments_of(pair, settings.seed, arguments)).encode()])


def all_cells(subject: Subject, get_part: GetPart, texts: Texts) -> dict[str, dict[str, Any]]:
    """The results of the metrics, by verification and batch size."""
    settings, cells = subject.settings, {}
    for verification in [name for name in settings.methods if name in settings.verifications]:
        in_distribution = verification in settings.in_distribution
        plain = plain_of(verification)
        for batch in settings.batch_sizes:
            name = f"{verification}, batch {batch}"
            ours = texts[verification, batch]
            cells[name] = {"acceptance": ours["acceptance"]}
            if in_distribution:
                cells[name]["law"] = get_part(
                    f"law, {name}", judge_distribution, verification, batch, ours["texts"], ours["observed"]
                )
            else:
                cells[name]["equality"] = get_part(
                    f"equality, {name}", judge_equality, verification, batch, texts[plain, batch], ours
                )
        if in_distribution:
            indices, plain_texts, our_texts = [], [], []
            for batch in settings.batch_sizes:
                indices += subject.prompt_indices(verification, batch)
                plain_texts += texts[plain, batch]["texts"]
                our_texts += texts[verification, batch]["texts"]
            quality = get_part(f"quality, {verification}", judge_quality, indices, plain_texts, our_texts)
            cells[verification] = {"quality": quality}
    return cells


def trace_one(subject: Subject) -> dict[str, Any]:
    """`trace` of one text of the first prompt, by token verification if that is checked."""
    verifications = subject.settings.verifications
    verification = "token" if "token" in verifications else verifications[-1]
    torch.manual_seed(subject.settings.batch_seed("trace", 1, 0))
    options = subject.settings.generate_options(verification)
    return trace(subject.target, subject.strategy(verification), subject.encoded([0]), options, subject.tokenizer)


def described(pair: DraftTargetPair) -> dict[str, str]:
    """Both models by class, size and where they came from on the Hub; a draft without a model by its class."""
    descriptions = {"target": "", "draft": type(pair.draft).__name__}
    for role, model in zip(("target", "draft"), pair.models, strict=False):
        facts = [type(model).__name__, f"{model.num_parameters():,} parameters"]
        source = pair.sources[role]
        if source is not None and source.name is not None:
            facts += [source.name, f"commit {source.revision}"]
        descriptions[role] = ", ".join(facts)
    return descriptions


@cache
def metric(name: str) -> Any:
    """The module for `evaluate` of this name in this package."""
    import evaluate

    return evaluate.load(path_of(name), keep_in_memory=True)


def judge_equality(
    subject: Subject, method: str, batch: int, plain: dict[str, Any], ours: dict[str, Any]
) -> dict[str, Any]:
    """Compare texts of a method with plain ones by `sequence_equality`, and their differences with rounding.

    "differences" are the first of each row: "plain" and "ours" are ids, -1 where a text has ended; "gap" is that of
    our token, None where it has none.
    """
    texts, options = ours["texts"], subject.settings.generate_options(method)
    result = metric("sequence_equality").compute(predictions=texts, references=plain["texts"])
    differences, rows, largest = [], [], 0.0
    for row, (text, position) in enumerate(zip(texts, result["first_difference"], strict=True)):
        reference = Reference(subject.target, options, subject.text(method, batch, row, text))
        largest = max(largest, reference.largest)
        noise = None
        if not is_greedy(method):
            noise = Noise(subject.settings.batch_seed(method, batch, row // batch), batch, row % batch)
        candidates = json.loads(ours["observed"][row])  # none of a text that was decoded plainly
        candidates += [-1] * (len(text) - len(candidates))
        gaps = gaps_of(reference, noise, len(text) if position < 0 else position, candidates)
        rows.append(gaps)
        if position >= 0:
            difference = difference_at(position, plain["texts"][row], text, gaps)
            differences.append({"row": row} | difference)
    rounding = Rounding(rows, rounding_scale(plain["rounding"]["mean"], largest))
    total = float(rounding.sums.sum())
    has_ended = any(-1 in (difference["plain"], difference["ours"]) for difference in differences)
    p_value = 0.0 if has_ended else rounding.p_value
    level = subject.settings.level_per_test
    return {
        "exact_match": result["exact_match"],
        "rows": len(texts),
        "tokens": sum(map(len, texts)),
        "differences": differences,
        "rounding": plain["rounding"],
        "gaps": None if math.isinf(total) else total,
        "expected_gaps": rounding.expected,
        "p_value": p_value,
        "level": level,
        "detectable_gap": None if p_value < level else rounding.detectable(level),
    }


def difference_at(position: int, plain: list[int], ours: list[int], gaps: Gaps) -> dict[str, Any]:
    """The first difference between two texts, as `judge_equality` says it."""
    plain_id, our_id = (text[position] if position < len(text) else -1 for text in (plain, ours))
    gap = math.inf if -1 in (plain_id, our_id) else float(gaps.chosen[position])
    difference = {"position": position, "plain": plain_id, "ours": our_id}
    return difference | {"gap": None if math.isinf(gap) else gap}


def judge_distribution(
    subject: Subject, method: str, batch: int, ours: list[list[int]], offers: list[str]
) -> dict[str, Any]:
    """The result of `sampled_law` for the texts at one batch size; `offers` are of `DraftOffers`."""
    result: dict[str, Any] = metric("sampled_law").compute(
        predictions=ours,
        references=[subject.prompt_ids[index] for index in subject.prompt_indices(method, batch)],
        model=subject.target,
        generation_config=GenerationConfig(**subject.settings.generate_options(method)),
        offers=list(map(json.loads, offers)),
        rounding=UNITS,
        level=subject.settings.level_per_test,
    )
    return result


def too_few(num_pairs: int, level: float) -> bool:
    """Whether so few pairs of texts could all differ in the same direction by chance."""
    return NUM_MEASURES * 2.0 ** (1 - num_pairs) >= level


def judge_quality(
    subject: Subject, indices: list[int], plain: list[list[int]], ours: list[list[int]]
) -> dict[str, Any] | None:
    """The result of `text_quality` for texts and plain texts after the same prompts; None if they are too few.

    Lengths are those of the tokens that were emitted, since text that is read again may have more of them.
    """
    level = subject.settings.level_per_test
    if too_few(len(ours), level):
        return None
    our_texts, plain_texts = subject.decoded(ours), subject.decoded(plain)
    perplexity = {"model": subject.target, "prompts": [subject.prompts[index] for index in indices]}
    # decoding drops end tokens, so a text may have none left; its pair then has no perplexity
    num_pairs = sum(bool(left.strip() and right.strip()) for left, right in zip(our_texts, plain_texts, strict=True))
    if too_few(num_pairs, level):
        perplexity = {}
    result: dict[str, Any] = metric("text_quality").compute(
        predictions=our_texts,
        references=plain_texts,
        tokenizer=subject.tokenizer,
        lengths=[list(map(len, ours)), list(map(len, plain))],
        level=1 - CONFIDENCE,
        seed=subject.settings.seed,
        **perplexity,
    )
    return result
