"""Loading and saving what a command names: a pair, or a target and a draft; once torch is imported."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_specx.bench.study import DraftTrial, Study, weightless_draft
from hf_specx.bench.tune import tune
from hf_specx.common.errors import require
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.hub.cards import known_card, known_config, render
from hf_specx.hub.fetch import get_files, get_pair
from hf_specx.hub.flatten import ENTRY
from hf_specx.hub.folders import INSIDE, REFERENCE
from hf_specx.hub.known_pairs import BY_NAME, is_embedded, is_known
from hf_specx.hub.pair_config import ModelSource, PairConfig
from hf_specx.hub.publish import CODE
from hf_specx.pairs.pair import DraftTargetPair

from .console import waiting_for
from .options import Loading, Named, is_kind
from .prompts import FilePrompts, Messages, Prompts


def device_map(device: str | None) -> str | None:
    """What --device says as a `device_map`; without it, "auto" if there is an accelerator."""
    if device in (None, "auto"):
        return "auto" if torch.cuda.is_available() else None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the second where torch was built without it
        first = str(error).partition("\n")[0]
        told = f"--device {device} is not available on this machine ({first}); give cpu, or leave it out."
        raise ValueError(told) from error
    return device


def study_of(loading: Loading, **how: Any) -> Study:
    """A `Study` of models that are loaded in this way."""
    hub = {} if loading.token is None else {"token": loading.token}
    where, trust = device_map(loading.device), loading.trust_remote_code
    return Study(dtype=loading.dtype, device_map=where, hub=hub, trust_remote_code=trust, **how)


def load_named(named: Named, needs_tokenizer: bool = False) -> DraftTargetPair:
    with waiting_for(f"loading {named.name}"):
        if named.target is not None:
            (trial,) = tune(named.target, [str(named.draft)], study_of(named), named.revision)
            require(trial.error is None, f"{named.draft} is no draft for {named.target}: {trial.error}")
            assert trial.pair is not None
            pair = trial.pair
        else:
            loaded = {} if named.draft is None or is_kind(named.draft) else {"draft": named.draft}
            pair = with_draft(load_given_pair(named.shown_pair, named, **loaded), named.draft)
    told = f"{named.name!r} has no tokenizer, so it cannot read text."
    require(pair.tokenizer is not None or not needs_tokenizer, told)
    return pair


def load_given_pair(name: str, loading: Loading, **more: Any) -> DraftTargetPair:
    """Load a pair of this name; `more` are arguments of `DraftTargetPair.from_pretrained`."""
    if is_known(name) and not is_embedded(name):
        ids = f"{BY_NAME[name].target} {BY_NAME[name].draft}"
        raise ValueError(f"{name!r} is not published as a pair; make one with specx tune {ids} --out FOLDER.")
    where = device_map(loading.device)
    placed: dict[str, Any] = {"device_map": where} if where else {}
    return DraftTargetPair.from_pretrained(name, dtype=loading.dtype, **placed, **more, **loading.hub)


def with_draft(pair: DraftTargetPair, draft: str | None) -> DraftTargetPair:
    """The pair with a kind of draft in place of its own, see `is_kind`; the pair itself where no kind is named.

    What was measured with its own draft, and recommended for it, does not hold then.
    """
    if draft is None or not is_kind(draft):
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


class PromptTexts:
    """Prompts of any number as texts, one by one; with --chat in the tokenizer's chat template, messages too."""

    def __init__(
        self, prompts: Prompts | FilePrompts, tokenizer: PreTrainedTokenizerBase | None, chat: bool, name: str
    ):
        self.prompts, self.chat = prompts, chat
        self.tokenizer: Any = tokenizer
        told = f"--chat: the tokenizer of {name!r} has no chat template; leave --chat out."
        require(not chat or bool(getattr(tokenizer, "chat_template", None)), told)

    def __iter__(self) -> Iterator[str]:
        return map(self._text_of, self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def _text_of(self, prompt: str | Messages) -> str:
        if not self.chat:
            return str(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        begins, first = self.tokenizer("")["input_ids"][:1], self.tokenizer.bos_token
        twice = first is not None and begins == [self.tokenizer.bos_token_id]  # by the template, and by the tokenizer
        return text.removeprefix(first) if twice else text


def saved_as(source: ModelSource | None, inside: bool) -> str:
    """Whether to save a model inside the pair or by reference."""
    return INSIDE if inside or source is None or source.name is None else REFERENCE


def save_best(best: DraftTrial, out: Path, inside: bool, overwrite: bool) -> str:
    """Save the pair with the best draft; returns a line that says where its models are."""
    assert best.pair is not None
    assert best.config is not None
    target, draft = (saved_as(source, inside) for source in (best.config.target, best.config.draft))
    best.pair.save_pretrained(out, target=target, draft=draft, overwrite=overwrite)
    return f"saved in {out}: target {target}, draft {draft if best.config.weightless_draft() is None else best.name}"


def config_of(name: str, revision: str | None, **hub: Any) -> PairConfig:
    """A pair's config, from a local folder of that name, else of a well-known pair, else from the Hub."""
    return known_config(name) if is_known(name) else get_pair(name, revision, **hub)[1]


def card_of(name: str, title: str | None, revision: str | None, **hub: Any) -> str:
    """The card of a pair, whose examples load it by its id; of a folder by `title` or else from there."""
    if is_known(name):
        return known_card(name)
    config, folder = config_of(name, revision, **hub), Path(name)
    code = get_files(name, revision, [f"{ENTRY}.py"], CODE, **hub).root / CODE / f"{ENTRY}.py"
    if title is None and folder.is_dir():
        return render(config, folder.resolve().name, code.is_file())
    return render(config, title or name, code.is_file())
