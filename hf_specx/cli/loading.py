"""Loading and saving what a command names: a pair, or a target and a draft; once torch is imported."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.bench.tune import tune
from hf_specx.bench.tune_settings import DraftTrial, TuneSettings
from hf_specx.common.chats import chat_text
from hf_specx.common.drafts import PAIR_CONFIG_NAME, SUFFIX, read_draft, split_revision
from hf_specx.common.errors import require
from hf_specx.common.wrappers import label_of
from hf_specx.hub.cards import embedded_card, embedded_config, render
from hf_specx.hub.fetch import find_draft_files, find_files, get_files, get_pair
from hf_specx.hub.flatten import ENTRY_MODULE
from hf_specx.hub.folders import INSIDE, REFERENCE
from hf_specx.hub.known_pairs import embedded_folder, folder_of, is_embedded
from hf_specx.hub.pair_config import PairConfig
from hf_specx.hub.publish import CODE_FOLDER, WritePair, loaded_pair, pair_as_it_is, reference_to
from hf_specx.hub.quantize import quantization_config
from hf_specx.pairs.pair import DraftTargetPair

from .console import say, waiting_for
from .options import LoadingOptions, PairOptions
from .prompts import Prompt


def device_map(device: str | None) -> str | None:
    """The `device_map` for `from_pretrained`; without --device-map, "auto" if there is an accelerator, else None."""
    if device in (None, "auto"):
        return "auto" if torch.accelerator.is_available() else None
    try:
        torch.empty(0, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError) as error:  # the second where torch was built without it
        first_line = str(error).partition("\n")[0]
        message = f"--device-map {device} is not available on this machine ({first_line}); give cpu, or leave it out."
        raise ValueError(message) from error
    return device


def tune_settings(loading: LoadingOptions, **options: Any) -> TuneSettings:
    """The settings of `tune` with models that are loaded in this way."""
    return TuneSettings(
        dtype=loading.dtype,
        device_map=device_map(loading.device_map),
        trust_remote_code=loading.trust_remote_code,
        quantize=loading.quantize,
        **options,
    )


def load_named(named: PairOptions, loading: LoadingOptions, chat: bool) -> DraftTargetPair:
    """Load the pair that a command names, or the target and the draft that it names as a pair.

    Raises ValueError if there is no tokenizer to read prompts with.
    """
    name, draft, settings = named.first, named.draft, tune_settings(loading)
    with waiting_for(f"loading {named.name}"):
        model = None if draft is None else read_draft(draft).model
        if model is not None:
            find_draft_files(folder_of(model))  # raises where there is none, or a pair
        if is_embedded(split_revision(name)[0]) or (find_files(name).root / PAIR_CONFIG_NAME).is_file():
            pair = load_pair(name, loading, None if draft is None else folder_of(draft))
        else:
            require(
                draft is not None,
                f"{name} is a model and no pair (it has no {PAIR_CONFIG_NAME}); name a draft for it, as --draft "
                f"{SUFFIX}, which needs no second model.",
            )
            (trial,) = tune(name, [str(draft)], settings)
            require(trial.error is None, f"{draft} is no draft for {name}: {trial.error}")
            assert trial.pair is not None
            pair = trial.pair
    require(pair.tokenizer is not None, f"{named.name!r} has no tokenizer, so it cannot read text.")
    check_template(pair.tokenizer, chat)
    return pair


def load_pair(named: str, loading: LoadingOptions, draft: str | None = None) -> DraftTargetPair:
    """Load a pair of this name, perhaps with another draft."""
    name, revision = split_revision(named)
    options: dict[str, Any] = vars(loading) | {"device_map": device_map(loading.device_map)}
    quantize = options.pop("quantize")
    if quantize is not None:
        options["quantization_config"] = quantization_config(quantize)
    return DraftTargetPair.from_pretrained(name, revision=revision, draft=draft, **options)


def say_what_runs(pair: DraftTargetPair, settings: dict[str, Any]) -> None:
    """Print target, draft and all settings in one line on stderr."""
    say(f"target {label_of(pair.target)}, draft {label_of(pair.draft)}: {in_words(settings)}", "dim")


def in_words(settings: dict[str, Any]) -> str:
    """Settings in the form name=value, separated by commas."""
    return ", ".join(f"{name}={value}" for name, value in settings.items() if value is not None)


def check_template(tokenizer: PreTrainedTokenizerBase | None, chat: bool) -> None:
    """Raise a ValueError for --chat where there is no chat template."""
    require(
        not chat or bool(getattr(tokenizer, "chat_template", None)),
        "--chat: the target's tokenizer has no chat template; leave --chat out.",
    )


def texts_of(
    prompts: Iterable[Prompt], tokenizer: PreTrainedTokenizerBase | None, template_options: dict[str, Any]
) -> list[str]:
    """Prompts as texts; messages in the tokenizer's chat template, which reads these options."""
    return [
        prompt if isinstance(prompt, str) else chat_text(tokenizer, prompt, template_options) for prompt in prompts
    ]


def texts_for(
    pair: DraftTargetPair, prompts: Iterable[Prompt], name: str, template_options: dict[str, Any] | None = None
) -> list[str]:
    """The texts of prompts, as `texts_of` gives them; where there are none, the pair's own."""
    texts = texts_of(prompts, pair.tokenizer, template_options or {}) or pair.prompts
    require(bool(texts), f"{name} brings no prompts of its own; give some with --prompts FILE, one a line.")
    return texts


def saved_as(pair: DraftTargetPair, role: str) -> str:
    """`REFERENCE` if a model of a pair is shown to be that of its id and commit, else `INSIDE`: how to save it."""
    reference, reason = reference_to(pair, role)
    if reason and reference.name is not None:
        say(f"warning: the {role} {reason}; it is saved inside the pair", "yellow")
    return INSIDE if reason else REFERENCE


def save_best(best: DraftTrial, out: Path, overwrite: bool) -> str:
    """Save the pair with the best draft; returns a line that says where its models are."""
    pair = best.pair
    assert pair is not None
    target = saved_as(pair, "target")
    if not isinstance(pair.draft, PreTrainedModel):
        pair.save_pretrained(out, target=target, draft=INSIDE, overwrite=overwrite)
        return f"saved in {out}: target {target}, draft {best.name}"
    draft = saved_as(pair, "draft")
    pair.save_pretrained(out, target=target, draft=draft, overwrite=overwrite)
    return f"saved in {out}: target {target}, draft {draft}"


def pair_to_publish(named: str, inside: bool, trust_remote_code: bool) -> tuple[WritePair, str]:
    """A function that writes the pair that a command names, and a text that says where its models are.

    It is loaded only where models that it names by id are to be inside, or where models inside may have code.
    """
    name, revision = split_revision(named)
    source = embedded_folder() if is_embedded(name) else name
    config = get_pair(source, revision)[1]
    models = {"target": config.target}
    if not config.weightless_draft():
        models["draft"] = config.draft
    references = [role for role, model in models.items() if model.name is not None]
    if (inside and references) or (trust_remote_code and len(references) < len(models)):
        pair = load_pair(named, LoadingOptions(trust_remote_code=trust_remote_code))
        if inside:
            references = []
        write = loaded_pair(pair, **dict.fromkeys(references, REFERENCE))
    else:
        write = pair_as_it_is(source, revision, trust_remote_code)
    target = REFERENCE if "target" in references else INSIDE
    draft = REFERENCE if "draft" in references else INSIDE
    if "draft" not in models:
        draft = type(config.weightless_draft()).__name__
    return write, f"target {target}, draft {draft}"


def config_of(named: str) -> PairConfig:
    """A pair's config, from a local folder of that name, else of the pair in the package, else from the Hub."""
    name, revision = split_revision(named)
    return embedded_config() if is_embedded(name) else get_pair(name, revision)[1]


def card_of(named: str, repo_id: str | None) -> str:
    """The card of a pair, whose examples load it by its id; of a folder by `repo_id` or else from there."""
    name, revision = split_revision(named)
    if is_embedded(name):
        return embedded_card()
    config, folder = config_of(named), Path(name)
    code = get_files(name, revision, [f"{ENTRY_MODULE}.py"], CODE_FOLDER).root / CODE_FOLDER / f"{ENTRY_MODULE}.py"
    if repo_id is None:
        repo_id = folder.resolve().name if folder.is_dir() else name
    return render(config, repo_id, code.is_file())
