"""The part of a model card that shows how to use a pair."""

import json
import shlex
from dataclasses import dataclass

from .markdown import fence
from .pair_config import ModelSource, PairConfig


EMBEDDED = "embedded"  # the pair in the package
CALL = "max_new_tokens=128, do_sample=True"
SPEECH, VISION = "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText"
PROCESSED = {  # what inputs are made of, where not of text alone
    SPEECH: '(audio, sampling_rate=16000, return_tensors="pt")',
    VISION: '(images=image, text=prompt, return_tensors="pt")',
}


@dataclass
class Card:
    """What the sections of one card share.

    Attributes:
        config: of the pair.
        name: id of its repository, "embedded", or what the title calls a pair that nobody has published.
        auto_class: of transformers, that loads the target.
    """

    config: PairConfig
    name: str
    auto_class: str

    @property
    def embedded(self) -> bool:
        return self.name == EMBEDDED

    @property
    def published(self) -> bool:
        """Whether there is a repository; two models by reference, neither pinned, are no more than two ids."""
        models = (self.config.target, self.config.draft)
        return not self.embedded and any(model.name is None or model.revision is not None for model in models)


def usage(card: Card) -> str:
    """The section, with examples that run as they stand."""
    if card.embedded:
        blocks = _embedded()
    elif card.published:
        blocks = [*_by_name(card), *_bound(card), *_quietly(card), *_by_package(card)]
    else:
        blocks = _put_together(card)
    return "\n\n".join(["## Example usage", *blocks])


def _by_name(card: Card) -> list[str]:
    name, source = json.dumps(card.name), _arguments(card.config.target, card.name)
    return [
        "Nothing of ours installed. `trust_remote_code=True` runs the code in `custom_generate/`: read it, and name "
        "the commit that you have read by `revision=`.",
        _python(f"""
{_inputs(card, source)}
model = {card.auto_class}.from_pretrained({source}, dtype="auto")
out = model.generate(**inputs, {CALL}, custom_generate={name}, trust_remote_code=True)
"""),
    ]


def _bound(card: Card) -> list[str]:
    if card.config.target.name is not None:
        return []
    name = json.dumps(card.name)
    return [
        "Bound to the model when it is loaded, so that later calls ask the Hub for nothing:",
        _python(f"""
model = {card.auto_class}.from_pretrained({name}, dtype="auto", trust_remote_code=True)
out = model.generate(**inputs, {CALL})
"""),
    ]


def _quietly(card: Card) -> list[str]:
    name = json.dumps(card.name)
    return [
        "By name, transformers asks the Hub once a call. It does not if the code is loaded once, or if it may not:",
        _python(f"""
speculative = model.load_custom_generate({name}, trust_remote_code=True)
out = speculative(model=model, **inputs, {CALL})

cached = {{"custom_generate": {name}, "trust_remote_code": True, "local_files_only": True}}
out = model.generate(**inputs, {CALL}, **cached)
"""),
    ]


def _by_package(card: Card) -> list[str]:
    return [
        "With the package `hf_specx`:",
        _python(f"""
from hf_specx import DraftTargetPair

pair = DraftTargetPair.from_pretrained({json.dumps(card.name)})
out = pair.generate(**inputs, {CALL})
print(pair.report)
"""),
    ]


def _embedded() -> list[str]:
    return [
        _python(f"""
from hf_specx import DraftTargetPair

pair = DraftTargetPair.from_pretrained("{EMBEDDED}")
inputs = pair.tokenizer(["def main("], return_tensors="pt")
out = pair.generate(**inputs, {CALL})
print(pair.report)
"""),
        "As a repository that runs with nothing of ours installed:",
        fence(f"specx publish {EMBEDDED} org/name", "bash"),
    ]


def _put_together(card: Card) -> list[str]:
    target, draft = card.config.target, card.config.draft
    reader = "AutoProcessor" if card.auto_class in PROCESSED else "AutoTokenizer"
    options = ""
    if reader == "AutoTokenizer":
        loaded = f"AutoTokenizer.from_pretrained({_arguments(draft)})"
        options = f",\n    tokenizer=tokenizer,\n    draft_tokenizer={loaded},\n"
    ids = shlex.join([target.name or "", draft.name or ""])
    return [
        _python(f"""
from hf_specx import SpeculativeDecoding
{_inputs(card, _arguments(target))}
model = {card.auto_class}.from_pretrained({_arguments(target)}, dtype="auto")
draft_model = {card.auto_class}.from_pretrained({_arguments(draft)}, dtype="auto")
strategy = SpeculativeDecoding({f"{chr(10)}    " if options else ""}draft_model{options})
out = model.generate(**inputs, {CALL}, custom_generate=strategy)
print(strategy.report)
"""),
        "Check the pair, measure it on prompts of your own, and publish it, so that it runs with nothing installed:",
        fence(f"specx tune {ids} --prompts prompts.txt --out pair\nspecx publish pair org/name", "bash"),
    ]


def _inputs(card: Card, source: str) -> str:
    """Imports, and the lines that make inputs."""
    made = PROCESSED.get(card.auto_class)
    if made is None:
        return (
            f"from transformers import {card.auto_class}, AutoTokenizer\n\n"
            f"tokenizer = AutoTokenizer.from_pretrained({source})\n"
            'inputs = tokenizer(["Once upon a time"], return_tensors="pt")'
        )
    return (
        f"from transformers import {card.auto_class}, AutoProcessor\n\n"
        f"processor = AutoProcessor.from_pretrained({source})\ninputs = processor{made}"
    )


def _arguments(model: ModelSource, home: str = "") -> str:
    """What `from_pretrained` takes for a model; `home` is the repository of what has no other."""
    named = {"revision": model.revision, "subfolder": model.subfolder or None}
    given = [f"{name}={json.dumps(value)}" for name, value in named.items() if value is not None]
    return ", ".join([json.dumps(model.name or home), *given])


def _python(text: str) -> str:
    return fence(text, "python")
