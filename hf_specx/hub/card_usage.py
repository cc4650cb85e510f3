"""The part of a model card that shows how to use a pair."""

import json
import re
import shlex
from dataclasses import dataclass

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from hf_specx.hub.known_pairs import EMBEDDED, SEQ2SEQ
from hf_specx.pair_files.facts import AUTO_CLASSES
from hf_specx.pair_files.pair_config import ModelSource, PairConfig

from .markdown import fence


CALL = "max_new_tokens=128, do_sample=True"
TEXT, SPEECH, VISION = "AutoModelForCausalLM", "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText"
AUTO_NAMES = [each.__name__ for each in AUTO_CLASSES]
CHATS = re.compile(r"(^|[-_/.])(instruct|it|chat)($|[-_.])", re.IGNORECASE)  # in names of models for conversations
PROCESSED = {  # arguments of the processor of models that do not read text alone
    SPEECH: '(audio, sampling_rate=16000, return_tensors="pt")',
    VISION: '(images=image, text=prompt, return_tensors="pt")',
}


PROSE = 'inputs = tokenizer(["Once upon a time"], return_tensors="pt")'
CHAT = """messages = [{"role": "user", "content": "Tell a story."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""


@dataclass
class Card:
    """What the sections of one card share.

    Attributes:
        config: of the pair.
        name: id or folder of its repository, "embedded", or a title for a pair that is not published.
        published: whether its repository has the code to use it.
        title: what the pair is called.
    """

    config: PairConfig
    name: str
    published: bool
    title: str

    @property
    def auto_class(self) -> str:
        """The class of transformers that loads the target."""
        return auto_class_of(self.config.target)

    @property
    def chats(self) -> bool:
        """Whether the target expects a conversation, judging by its name."""
        return self.auto_class == TEXT and CHATS.search(self.config.target.name or self.title) is not None

    @property
    def embedded(self) -> bool:
        return self.name == EMBEDDED and not self.published

    @property
    def saved(self) -> bool:
        """Whether the pair is in a folder or repository, and not just two ids without a commit."""
        models = (self.config.target, self.config.draft)
        return any(model.name is None or model.revision is not None for model in models)


def auto_class_of(model: ModelSource) -> str:
    """The class of transformers that loads a model; guessed from its type where the config does not say."""
    if model.auto_class in AUTO_NAMES:  # so that examples hold no other text of a config
        return str(model.auto_class)
    if model.model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return SEQ2SEQ
    return SPEECH if model.model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES else TEXT


def usage(card: Card) -> str:
    """The section "Example usage", with examples that run as they are."""
    if card.embedded:
        blocks = _embedded()
    elif card.published:
        blocks = [*_by_name(card), *_bound(card), *_quietly(card), *_by_package(card)]
    elif card.saved:
        blocks = _by_package(card, _inputs(card, _arguments(card.config.target, card.name)))
    else:
        blocks = _put_together(card)
    return "\n\n".join(["## Example usage", *blocks])


def _by_name(card: Card) -> list[str]:
    name, source = json.dumps(card.name), _arguments(card.config.target, card.name)
    return [
        "With nothing but transformers installed. `trust_remote_code=True` runs the code in `custom_generate/`: read "
        "it, and name the commit that you have read by `revision=`.",
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
        "By name, transformers asks the Hub in each call. It does not if the code is loaded once, or with "
        "`local_files_only=True`:",
        _python(f"""
speculative = model.load_custom_generate({name}, trust_remote_code=True)
out = speculative(model=model, **inputs, {CALL})

cached = {{"custom_generate": {name}, "trust_remote_code": True, "local_files_only": True}}
out = model.generate(**inputs, {CALL}, **cached)
"""),
    ]


def _by_package(card: Card, inputs: str = "") -> list[str]:
    """With the package installed; `inputs` is code that makes them, "" where an earlier example has done so."""
    return [
        "With the package `hf_specx`:",
        _python(f"""
from hf_specx import DraftTargetPair
{inputs}
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
        "As a repository that runs with nothing but transformers installed:",
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
draft_model = {auto_class_of(draft)}.from_pretrained({_arguments(draft)}, dtype="auto")
strategy = SpeculativeDecoding({f"{chr(10)}    " if options else ""}draft_model{options})
out = model.generate(**inputs, {CALL}, custom_generate=strategy)
print(strategy.report)
"""),
        "Check the pair, measure it on prompts of your own, and publish it, so that it runs without this package:",
        fence(f"specx tune {ids} --prompts prompts.txt --out pair\nspecx publish pair org/name", "bash"),
    ]


def _inputs(card: Card, source: str) -> str:
    """Code that makes `inputs`, with its imports."""
    made = PROCESSED.get(card.auto_class)
    if made is None:
        return (
            f"from transformers import {card.auto_class}, AutoTokenizer\n\n"
            f"tokenizer = AutoTokenizer.from_pretrained({source})\n{CHAT if card.chats else PROSE}"
        )
    return (
        f"from transformers import {card.auto_class}, AutoProcessor\n\n"
        f"processor = AutoProcessor.from_pretrained({source})\ninputs = processor{made}"
    )


def _arguments(model: ModelSource, home: str = "") -> str:
    """The arguments of `from_pretrained` for a model; `home` is the pair's repository, for models inside it."""
    named = {"revision": model.revision, "subfolder": model.subfolder or None}
    given = [f"{name}={json.dumps(value)}" for name, value in named.items() if value is not None]
    return ", ".join([json.dumps(model.name or home), *given])


def _python(text: str) -> str:
    return fence(text, "python")
