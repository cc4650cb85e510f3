"""`check`: prove on a pair and prompts of your own that speculative text is plain text, by the tools of `evaluate`."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import tqdm

from hf_specx.bench.store import StepCounter, Store, code_digest, provenance
from hf_specx.bench.timer import Advance
from hf_specx.common.errors import require
from hf_specx.common.tokenizers import vocabulary_of
from hf_specx.hub.flatten import PACKAGE
from hf_specx.hub.known_pairs import embedded_folder
from hf_specx.pairs.fingerprint import digest_of, drafts_of, weights_digest
from hf_specx.pairs.pair import DraftTargetPair
from hf_specx.pairs.progress import DELAY
from hf_specx.scheduling.draft_length import FIXED_DRAFT_TOKENS

from .cells import (
    judge_acceptance,
    judge_distribution,
    judge_draft,
    judge_equality,
    judge_quality,
    judge_texts,
    trace_one,
)
from .page import check_can_write, write_report
from .power import power_of
from .result import CheckResult, lines_of
from .settings import CHECKED, PLAIN_GREEDY, PLAIN_SAMPLED, TIMED_RUNS, Settings, check_packages
from .speed import measure_speed
from .texts import Subject, ask_first, generate_texts


SHOWN = 4  # texts of each way that a result has
Texts = dict[tuple[str, int], dict[str, Any]]  # by way to generate and batch size


def check(
    pair: DraftTargetPair,
    prompts: Sequence[str] | None = None,
    *,
    batch_sizes: Sequence[int] = (1, 8),
    new_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
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
        batch_sizes, new_tokens, ..., level: as in `Settings`.
        advance: called after each of `Settings(...).steps(len(prompts), timed=report is not None)` steps; else a bar.
        path: of a file that gets each part as soon as it is known, and from which an interrupted check goes on.
        report: of a page (.html) to write, with a folder of its figures; then speed is measured as well.
        **options: what `generate` is given besides, plain and speculative alike; plain values.

    Raises:
        ValueError: before any forward, for what cannot be checked.

    Example:
        >>> hf_specx.check(pair, prompts, batch_sizes=(1, 2), new_tokens=16).passed
        True
    """
    sizes, how = tuple(batch_sizes), (temperature, top_p, top_k, tuple(verifications))
    settings = Settings(sizes, new_tokens, *how, samples, num_draft_tokens, seed, level, options)
    texts = prompts if isinstance(prompts, str) else list(pair.prompts if prompts is None else prompts)
    check_can_write(report)
    subject, path = subject_of(pair, texts, settings), None if path is None else Path(path)
    result = run_check(subject, advance, path, timed=report is not None)
    result.pair, result.command = name_of(pair), call_in_python(settings, own_prompts=prompts is None)
    if report is not None:
        write_report(result, report)
    return result


def run_check(
    subject: Subject, advance: Advance | None = None, path: Path | None = None, timed: bool = False
) -> CheckResult:
    """`check` of what was put together by `subject_of`; `timed` with speed, for a report."""
    pair, settings, prompts = subject.pair, subject.settings, subject.prompts
    made = provenance(pair.target) | described(pair) | {"code": code_digest(sorted(PACKAGE.rglob("*.py")))}
    models = [weights_digest(model) for model in pair.models]
    how = pair.strategy.layout, pair.strategy.compile, pair.strategy.tokenizer_match
    vocabularies = [None if x is None else vocabulary_of(x).digest for x in (pair.tokenizer, pair.draft_tokenizer)]
    asked = [settings.to_dict(), prompts, subject.ids, models, drafts_of(pair), *how, *vocabularies]
    store = Store(path, "check", made | {"asked": digest_of([json.dumps(asked).encode()])})
    with counted(settings.steps(len(prompts), timed), advance) as step, generator_untouched():
        parts = Parts(store, step)
        texts = all_texts(subject, parts)
        cells = all_cells(subject, parts, texts)
        traced = parts("trace", 1, partial(trace_one, subject))
        timing = partial(measure_speed, subject, parts.step)
        speed = parts("speed", TIMED_RUNS, timing) if timed else {}
    return CheckResult(
        lines_of(settings, cells),
        settings.to_dict(),
        made,
        prompts,
        cells,
        shown_texts(subject, texts),
        traced,
        speed=speed,
        power=power_of(settings, cells),
    )


def subject_of(pair: DraftTargetPair, prompts: Any, settings: Settings) -> Subject:
    """What is checked; raises for what cannot be, before any forward."""
    check_packages()
    require(
        not pair.target.config.is_encoder_decoder,
        "the pair is of encoder-decoders, whose distributions a check does not know; compare greedy texts yourself.",
    )
    require(
        pair.tokenizer is not None,
        "the pair has no tokenizer to read prompts with; DraftTargetPair(target, draft, tokenizer) gives it one.",
    )
    listed = prompts and not isinstance(prompts, str) and all(isinstance(text, str) for text in prompts)
    own = "" if prompts else "none "
    require(bool(listed), f"prompts={str(prompts)[:40]!r}: give a list of texts; the pair has {own}of its own.")
    subject = Subject(pair, prompts, settings)
    subject.encoded(list(range(len(prompts))))  # raises for prompts that are empty or too long
    ask_first(subject)
    return subject


def name_of(pair: DraftTargetPair) -> str:
    """What a pair is called: "embedded", or where its models come from."""
    names = [model.name_or_path or type(model).__name__ for model in pair.models]
    if names[0] == str(embedded_folder()):
        return "embedded"
    weightless = [] if len(names) > 1 else [type(pair.draft).__name__]
    return " with ".join(dict.fromkeys([*names, *weightless]))  # both may be in one folder


def call_in_python(settings: Settings, own_prompts: bool) -> str:
    """The call of `check` that these settings come from; `own_prompts` of the pair need not be named."""
    usual, options = Settings(), settings.options
    changed = {each.name: getattr(settings, each.name) for each in fields(settings) if each.name != "options"}
    changed = {name: value for name, value in changed.items() if value != getattr(usual, name)} | options
    arguments = ["pair", *([] if own_prompts else ["prompts"]), *(f"{name}={x!r}" for name, x in changed.items())]
    return f"hf_specx.check({', '.join(arguments)})"


def described(pair: DraftTargetPair) -> dict[str, str]:
    """Both models by class and size, and where they came from on the Hub; a draft without a model by its class."""
    found = {"target": "", "draft": type(pair.draft).__name__}
    for role, model in zip(("target", "draft"), pair.models, strict=False):
        facts, source = [type(model).__name__, f"{model.num_parameters():,} parameters"], pair.sources[role]
        if source is not None and source.name is not None:
            facts += [source.name, f"commit {source.revision}"]
        found[role] = ", ".join(facts)
    return found


class Parts:
    """Makes each part of a check, or takes it from what is known, and counts its steps in either case."""

    def __init__(self, store: Store, advance: Advance):
        self.store, self.advance = store, advance
        self.steps = StepCounter(0, advance)

    def __call__(self, name: str, steps: int, make: Callable[[], Any]) -> Any:
        self.steps = StepCounter(steps, self.advance)
        found = self.store.take(name, make)
        self.steps.finish()
        return found

    def step(self) -> None:
        """One of the steps of the part that is being made."""
        self.steps()


def all_texts(subject: Subject, parts: Parts) -> Texts:
    """What is generated in each way at each batch size."""
    settings, found = subject.settings, {}
    for batch in settings.batch_sizes:
        for way in settings.ways:
            runs = len(settings.batches(way, batch, len(subject.prompts)))
            make = partial(generate_texts, subject, way, batch, parts.step)
            found[way, batch] = parts(f"texts, {way}, batch {batch}", runs, make)
    return found


def all_cells(subject: Subject, parts: Parts, texts: Texts) -> dict[str, dict[str, Any]]:
    """What the metrics say of each verification."""
    settings, cells = subject.settings, {}
    for way in settings.ways:
        if way in (PLAIN_GREEDY, PLAIN_SAMPLED):
            continue
        for batch in settings.batch_sizes:
            name, ours = f"{way}, batch {batch}", texts[way, batch]
            cells[name] = {"acceptance": judge_acceptance(ours)}
            if way in settings.in_distribution:
                cells[name]["law"] = parts(f"law, {name}", 1, partial(judge_distribution, subject, way, batch, ours))
                cells[name]["draft"] = parts(f"draft, {name}", 1, partial(judge_draft, subject, way, batch, ours))
            else:
                plain = texts[PLAIN_GREEDY if way == "greedy" else PLAIN_SAMPLED, batch]
                make = partial(judge_equality, subject, way, batch, plain, ours)
                cells[name]["equality"] = parts(f"equality, {name}", 1, make)
        if way in settings.in_distribution:
            pooled = [pool(settings, texts, each) for each in (PLAIN_SAMPLED, way)]
            indices = [index for batch in settings.batch_sizes for index in subject.prompt_indices(way, batch)]
            cells[way] = {
                "two_samples": parts(f"two samples, {way}", 1, partial(judge_texts, subject, *pooled)),
                "quality": parts(f"quality, {way}", 1, partial(judge_quality, subject, indices, *pooled)),
            }
    return cells


def pool(settings: Settings, texts: Texts, way: str) -> list[list[int]]:
    """The texts of one way at all batch sizes."""
    return [text for batch in settings.batch_sizes for text in texts[way, batch]["texts"]]


def shown_texts(subject: Subject, texts: Texts) -> dict[str, list[dict[str, Any]]]:
    """The first texts of each way at the first batch size, as strings."""
    first, found = subject.settings.batch_sizes[0], {}
    for way in subject.settings.ways:
        indices, shown = subject.prompt_indices(way, first), subject.decoded(texts[way, first]["texts"][:SHOWN])
        found[way] = [{"prompt": index, "text": text} for index, text in zip(indices, shown, strict=False)]
    return found


@contextmanager
def counted(steps: int, advance: Advance | None) -> Iterator[Advance]:
    """What counts a step: the caller's own function, or a progress bar, which appears after some seconds."""
    if advance is not None:
        yield advance
        return
    with tqdm(total=steps, delay=DELAY, desc="checking") as bar:
        yield bar.update


@contextmanager
def generator_untouched() -> Iterator[None]:
    """Whatever is drawn inside, the default generators of all devices are left as they were."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    everywhere = range(torch.accelerator.device_count())  # all are seeded by `torch.manual_seed`
    with torch.random.fork_rng(everywhere, device_type="cuda" if kind is None else kind.type):
        yield
