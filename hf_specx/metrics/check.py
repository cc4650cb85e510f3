"""`check`: prove on a pair and prompts of your own that speculative text is plain text, by the tools of `evaluate`."""

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

from hf_specx.bench.inputs import settings_of
from hf_specx.bench.store import Store, provenance
from hf_specx.bench.timer import Advance
from hf_specx.bench.trace import trace
from hf_specx.common.errors import brief, require
from hf_specx.common.wrappers import label_of
from hf_specx.drafting.auto import FIXED_DRAFT_TOKENS
from hf_specx.hub.flatten import PACKAGE
from hf_specx.hub.folders import without_folders
from hf_specx.metrics import path as path_of
from hf_specx.pairs.fingerprint import arguments_of, digest_of
from hf_specx.pairs.pair import DraftTargetPair

from .equality import Noise, Reference, Rounding, gaps_of, rounding_scale
from .page import check_can_write, page
from .result import CheckResult, lines_of
from .settings import CHECKED, UNITS, Settings, check_packages, is_greedy, plain_of
from .texts import Subject, generate_texts


SHOWN = 4  # texts of each way that a result has
CONFIDENCE = 0.95  # of intervals
MEASURES = 4  # of quality
Part = Callable[..., Any]  # makes what has a name, by a function of a subject and more, unless it is known
Texts = dict[tuple[str, int], dict[str, Any]]  # by way to generate and batch size


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
        **options: what `generate` is given besides, plain and speculative alike; plain values.

    Raises:
        ValueError: for what cannot be checked, before the first token of ours.

    Example:
        >>> hf_specx.check(pair, prompts, batch_sizes=(2,), max_new_tokens=8).passed
        True
    """
    drawn = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    how: dict[str, Any] = {"samples": samples, "num_draft_tokens": num_draft_tokens, "seed": seed, "level": level}
    settings = Settings(tuple(batch_sizes), verifications=tuple(verifications), options=options, **how)
    check_can_write(report)
    subject = subject_of(pair, prompts, settings, drawn)
    with tqdm(total=settings.steps, delay=3, desc="checking", disable=advance is not None) as bar:
        result = run_check(subject, advance or bar.update, path)
    result.pair = without_folders(" with ".join(map(label_of, (pair.target, *pair.drafts))))
    if report is not None:
        Path(report).write_text(page(result), encoding="utf-8")
    return result


def subject_of(pair: DraftTargetPair, prompts: Any, settings: Settings, given: dict[str, Any]) -> Subject:
    """What is checked; raises for what cannot be. Of `given`, arguments of `generate`, None is the target's own."""
    check_packages()
    told = f"pair={pair!r} is no DraftTargetPair; load it, as by DraftTargetPair.from_pretrained(name)."
    require(isinstance(pair, DraftTargetPair), told)
    prompts = prompts if isinstance(prompts, str) else list(pair.prompts if prompts is None else prompts)
    told = "the pair is of encoder-decoders, whose distributions a check does not know; compare greedy texts yourself."
    require(not pair.target.config.is_encoder_decoder, told)
    told = "the pair has no tokenizer to read prompts with; DraftTargetPair(target, draft, tokenizer) gives it one."
    require(pair.tokenizer is not None, told)
    listed = prompts and not isinstance(prompts, str) and all(isinstance(text, str) for text in prompts)
    told = f"prompts={brief(prompts)}: give a list of texts; without it the pair's own are taken, if it has any."
    require(bool(listed), told)
    given = {name: value for name, value in given.items() if value is not None}
    drawn = settings_of(pair.target, {"do_sample": True} | given, settings.max_new_tokens)
    drawn.pop("do_sample")  # some of what is checked is greedy
    subject = Subject(pair, prompts, replace(settings, **drawn))
    subject.encoded(list(range(len(prompts))))  # raises for prompts that are empty or too long
    return subject


def run_check(subject: Subject, advance: Advance, path: str | Path | None = None) -> CheckResult:
    """`check` of what was put together by `subject_of`."""
    made = provenance(subject.target) | described(subject.pair)
    made |= {"code": digest_of(file.read_bytes() for file in sorted(PACKAGE.rglob("*.py")))}
    store = Store(None if path is None else Path(path), "check", made | {"asked": asked_of(subject)})

    def part(name: str, make: Callable[..., Any], *args: Any) -> Any:
        found = store.take(name, partial(make, subject, *args))
        advance()
        return found

    accelerator = torch.accelerator.current_accelerator()
    everywhere = range(torch.accelerator.device_count())  # all of them are seeded by `torch.manual_seed`
    with torch.random.fork_rng(everywhere, device_type="cuda" if accelerator is None else accelerator.type):
        texts = {
            (way, batch): part(f"texts, {way}, batch {batch}", generate_texts, way, batch)
            for batch in subject.settings.batch_sizes
            for way in subject.settings.ways
        }
        cells = all_cells(subject, part, texts)
        traced = part("trace", trace_one)
    first, shown = subject.settings.batch_sizes[0], {}
    for way in subject.settings.ways:
        pairs = zip(subject.prompt_indices(way, first), texts[way, first]["texts"][:SHOWN], strict=False)
        shown[way] = [{"prompt": index, "text": subject.decoded([text])[0]} for index, text in pairs]
    lines, settings = lines_of(subject.settings, cells), subject.settings.to_dict()
    return CheckResult(lines, settings, made, subject.prompts, cells, shown, traced)


def asked_of(subject: Subject) -> str:
    """Tells a check from one of other settings, prompts, models, drafts or tokenizers."""
    pair, settings = subject.pair, subject.settings
    told = {"prompts": subject.prompts, "ids": subject.ids, "tokenizers": [pair.tokenizer, pair.draft_tokenizer]}
    told |= {"layout": pair.strategy.layout, "compile": pair.strategy.compile} | settings.to_dict()
    return digest_of([json.dumps(arguments_of(pair, settings.seed, told)).encode()])


def all_cells(subject: Subject, part: Part, texts: Texts) -> dict[str, dict[str, Any]]:
    """What the metrics say of each verification."""
    settings, cells = subject.settings, {}
    for way in (way for way in settings.ways if way in settings.verifications):
        in_distribution, plain = way in settings.in_distribution, plain_of(way)
        for batch in settings.batch_sizes:
            name, ours = f"{way}, batch {batch}", texts[way, batch]["texts"]
            cells[name] = {"acceptance": texts[way, batch]["acceptance"]}
            if in_distribution:
                args = way, batch, ours, texts[way, batch]["heard"]
                cells[name]["law"] = part(f"law, {name}", judge_distribution, *args)
            else:
                args = way, batch, texts[plain, batch], texts[way, batch]
                cells[name]["equality"] = part(f"equality, {name}", judge_equality, *args)
        if in_distribution:
            sizes = settings.batch_sizes
            pooled = [[text for size in sizes for text in texts[each, size]["texts"]] for each in (plain, way)]
            indices = [index for size in sizes for index in subject.prompt_indices(way, size)]
            cells[way] = {"quality": part(f"quality, {way}", judge_quality, indices, *pooled)}
    return cells


def trace_one(subject: Subject) -> dict[str, Any]:
    """`trace` of one text of the first prompt, by token verification if that is checked."""
    chosen = subject.settings.verifications
    way = "token" if "token" in chosen else chosen[-1]
    torch.manual_seed(subject.settings.run_seed("trace", 1, 0))
    options = subject.settings.generation(way)
    return trace(subject.target, subject.strategy(way), subject.encoded([0]), options, subject.tokenizer)


def described(pair: DraftTargetPair) -> dict[str, str]:
    """Both models by class, size and where they came from on the Hub; a draft without a model by its class."""
    found = {"target": "", "draft": type(pair.draft).__name__}
    for role, model in zip(("target", "draft"), pair.models, strict=False):
        facts, source = [type(model).__name__, f"{model.num_parameters():,} parameters"], pair.sources[role]
        if source is not None and source.name is not None:
            facts += [source.name, f"commit {source.revision}"]
        found[role] = ", ".join(facts)
    return found


@cache
def metric(name: str) -> Any:
    """One of this package's, by its name."""
    import evaluate

    return evaluate.load(path_of(name), keep_in_memory=True)


def judge_equality(
    subject: Subject, way: str, batch: int, plain: dict[str, Any], ours: dict[str, Any]
) -> dict[str, Any]:
    """`sequence_equality` of the texts of a way and the plain ones, and what `Rounding` says of ours.

    "differences" are the first of each row: "plain" and "ours" are ids, -1 where a text has ended; "gap" is that of
    our token, None where it has none.
    """
    texts, options, level = ours["texts"], subject.settings.generation(way), subject.settings.share
    result = metric("sequence_equality").compute(predictions=texts, references=plain["texts"])
    differences, rows, largest = [], [], 0.0
    for row, (text, position) in enumerate(zip(texts, result["first_difference"], strict=True)):
        reference = Reference(subject.target, options, subject.text(way, batch, row, text))
        seed = subject.settings.run_seed(way, batch, row // batch)
        noise = None if is_greedy(way) else Noise(seed, batch, row % batch)
        parts_at = len(text) if position < 0 else position
        candidates = json.loads(ours["heard"][row])  # none of a text that was decoded plainly
        rows.append(gaps_of(reference, noise, parts_at, candidates + [-1] * (len(text) - len(candidates))))
        largest = max(largest, reference.largest)
        if position >= 0:
            left, right = (each[position] if position < len(each) else -1 for each in (plain["texts"][row], text))
            gap = math.inf if -1 in (left, right) else float(rows[-1].chosen[position])
            difference = {"row": row, "position": position, "plain": left, "ours": right}
            differences.append(difference | {"gap": None if math.isinf(gap) else gap})
    rounding = Rounding(rows, rounding_scale(plain["rounding"]["mean"], largest))
    total = float(rounding.sums.sum())
    ended = any(-1 in (difference["plain"], difference["ours"]) for difference in differences)
    chance = 0.0 if ended else rounding.p_value
    return {
        "exact_match": result["exact_match"],
        "rows": len(texts),
        "tokens": sum(map(len, texts)),
        "differences": differences,
        "rounding": plain["rounding"],
        "gaps": None if math.isinf(total) else total,
        "expected_gaps": rounding.expected,
        "p_value": chance,
        "level": level,
        "detectable_gap": None if chance < level else rounding.detectable(level),
    }


def judge_distribution(
    subject: Subject, way: str, batch: int, ours: list[list[int]], offers: list[str]
) -> dict[str, Any]:
    """`sampled_law` of the texts at one batch size, with what the draft offered."""
    found: dict[str, Any] = metric("sampled_law").compute(
        predictions=ours,
        references=[subject.ids[index] for index in subject.prompt_indices(way, batch)],
        model=subject.target,
        generation_config=GenerationConfig(**subject.settings.generation(way)),
        offers=list(map(json.loads, offers)),
        rounding=UNITS,
        level=subject.settings.share,
    )
    return found


def too_few(pairs: int, share: float) -> bool:
    """Whether all differences of so many pairs of texts may have one sign by chance, at a level that is shared."""
    return MEASURES * 2.0 ** (1 - pairs) >= share


def judge_quality(
    subject: Subject, indices: list[int], plain: list[list[int]], ours: list[list[int]]
) -> dict[str, Any] | None:
    """`text_quality` of all texts of a verification beside plain ones of the same prompts; None of too few texts.

    Lengths are those of the tokens that were emitted, since text that is read again may have more of them.
    """
    share = subject.settings.share
    if too_few(len(ours), share):
        return None
    texts = [subject.decoded(each) for each in (ours, plain)]
    judge = {"model": subject.target, "prompts": [subject.prompts[index] for index in indices]}
    # decoding drops end tokens, so a text may have none left; its pair then has no perplexity
    pairs = sum(bool(left.strip() and right.strip()) for left, right in zip(*texts, strict=True))
    found: dict[str, Any] = metric("text_quality").compute(
        predictions=texts[0],
        references=texts[1],
        tokenizer=subject.tokenizer,
        lengths=[[len(text) for text in each] for each in (ours, plain)],
        level=1 - CONFIDENCE,
        seed=subject.settings.seed,
        **({} if too_few(pairs, share) else judge),
    )
    return found
