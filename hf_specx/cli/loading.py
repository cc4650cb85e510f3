"""Loading what a command names: a pair, or a target and a draft."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_specx.bench.checks import looking_for
from hf_specx.bench.compatibility import ERROR, find_fit
from hf_specx.bench.study import DraftTrial, Study, weightless_draft
from hf_specx.bench.tune import describe, load
from hf_specx.common.devices import last_device
from hf_specx.common.errors import require
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.hub.fetch import SMALL_FILES, get_files
from hf_specx.hub.folders import INSIDE, REFERENCE
from hf_specx.hub.known_pairs import BY_NAME, is_embedded, is_known
from hf_specx.hub.pair_config import ModelSource
from hf_specx.pairs.loading import LoadedPair
from hf_specx.pairs.pair import DraftTargetPair

from .console import lines_now_and_then
from .options import Messages, Named, check_name, is_kind
from .prompts import check_messages


def default_device_map() -> str | None:
    """`"auto"` if there is an accelerator, else None."""
    return "auto" if torch.cuda.is_available() else None


def device_map(device: str | None) -> str | None:
    """What --device says as a `device_map`.

    Raises:
        ValueError: there is no such device.
    """
    if device in (None, "auto"):
        return default_device_map()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the second where torch was built without it
        first = str(error).partition("\n")[0]
        told = f"--device {device} is not available on this machine ({first}); give cpu, or leave it out."
        raise ValueError(told) from error
    return device


def load_named(named: Named) -> DraftTargetPair:
    """Load what a command names.

    Raises:
        ValueError: there is no such pair or model, its files are wrong, or the draft does not fit the target.
    """
    with lines_now_and_then(lambda: f"loading {named.name}"):
        return load_one(named) if named.target is None else load_two(named, named.target)


def load_one(named: Named) -> DraftTargetPair:
    """Load a pair by its name, with the draft that is named for it."""
    hub, device = named.hub or {}, device_map(named.device)
    if named.draft is None or is_kind(named.draft):
        return with_draft(load_given_pair(named.shown_pair, named.dtype, device, **hub), named.draft)
    with looking_for(named.draft):  # what is not found is not the pair
        get_files(named.draft, None, SMALL_FILES, **{name: hub[name] for name in ("token",) if name in hub})
    return load_given_pair(named.shown_pair, named.dtype, device, draft=named.draft, **hub)


def load_two(named: Named, name: str) -> DraftTargetPair:
    """Load a target by its name, and the draft for it."""
    hub = dict(named.hub or {})
    revision, trust = hub.pop("revision", None), hub.pop("trust_remote_code", False)
    study = Study(dtype=named.dtype, device_map=device_map(named.device), hub=hub, trust_remote_code=trust)
    target = load(name, revision, study, study.device_map)
    assert named.draft is not None
    weightless = weightless_draft(named.draft)
    if weightless is not None:
        return DraftTargetPair(target.model, weightless, target.tokenizer)
    draft = load(named.draft, None, study, {"": last_device(target.model)})
    findings = find_fit(target.model, draft.model, target.tokenizer, draft.tokenizer, [])
    wrong = next((finding.follows for finding in findings if finding.verdict == ERROR), None)
    require(wrong is None, f"the draft does not fit the target: {wrong}")
    sources: dict[str, ModelSource | None] = {"target": target.facts, "draft": draft.facts}
    tokenizers, config = (target.tokenizer, draft.tokenizer), describe(target, draft, study)
    return DraftTargetPair.from_loaded(LoadedPair(target.model, draft.model, *tokenizers, config, sources))


def load_given_pair(name: str, dtype: str, device: str | None, **options: Any) -> DraftTargetPair:
    """Load a pair.

    Args:
        name: id, folder, or "embedded".
        dtype: one of `DTYPES`.
        device: its `device_map`.
        **options: for `DraftTargetPair.from_pretrained`.

    Raises:
        ValueError: there is no such pair, or its files are wrong.
    """
    check_name(name)
    if is_known(name) and not is_embedded(name):
        ids = f"{BY_NAME[name].target} {BY_NAME[name].draft}"
        raise ValueError(f"{name!r} is not published as a pair; make one with specx tune {ids} --out FOLDER.")
    placed = {"device_map": device} if device else {}
    with looking_for(name):
        return DraftTargetPair.from_pretrained(name, dtype=dtype, **placed, **options)


def with_draft(pair: DraftTargetPair, draft: str | None) -> DraftTargetPair:
    """The pair with a kind of draft in place of its own, see `is_kind`; the pair itself where nothing is asked for.

    What was measured with its own draft, and recommended for it, does not hold then.
    """
    if draft is None:
        return pair
    config = copy.deepcopy(pair.config)
    config.forget()
    weightless = weightless_draft(draft)
    if weightless is not None:
        config.set_draft(weightless)
        made = DraftTargetPair(pair.target, weightless, pair.tokenizer, config)
    else:
        own = pair.draft if isinstance(pair.draft, list) else [pair.draft]
        made = DraftTargetPair(pair.target, [SuffixDraft(), *own], pair.tokenizer, config, pair.draft_tokenizer)
    made.sources["target"] = pair.sources["target"]
    return made


def texts_of(
    prompts: list[str | Messages], tokenizer: PreTrainedTokenizerBase | None, chat: bool, name: str
) -> list[str]:
    """The prompts as texts; with --chat, and where they are messages, in the tokenizer's chat template.

    Raises:
        ValueError: prompts are messages without --chat, or there is no chat template.
    """
    check_messages(prompts, chat)
    if not chat:
        return [prompt for prompt in prompts if isinstance(prompt, str)]
    template = None if tokenizer is None else tokenizer.chat_template
    require(bool(template), f"--chat: the tokenizer of {name!r} has no chat template; leave --chat out.")
    assert tokenizer is not None
    texts = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        texts.append(str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)))
    begins, first = tokenizer("")["input_ids"][:1], tokenizer.bos_token
    twice = first is not None and begins == [tokenizer.bos_token_id]  # by the template, and by the tokenizer
    return [text.removeprefix(first) if twice else text for text in texts]


def saved_as(source: ModelSource, inside: bool) -> str:
    """Whether to save a model inside the pair or by reference."""
    return INSIDE if inside or source.name is None else REFERENCE


def save_best(best: DraftTrial, out: Path, inside: bool, overwrite: bool) -> str:
    """Save the pair with the best draft; returns a line that says where its models are."""
    assert best.pair is not None
    assert best.config is not None
    target, draft = (saved_as(source, inside) for source in (best.config.target, best.config.draft))
    best.pair.save_pretrained(out, target=target, draft=draft, overwrite=overwrite)
    return f"saved in {out}: target {target}, draft {draft if best.config.weightless_draft() is None else best.name}"
