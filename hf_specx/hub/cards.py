"""Model cards: the README.md of a pair's repository, rendered from its config and nothing else.

The text is in `card.md.jinja`, with the sections of the Hub's own repositories that have a `custom_generate` folder.
Text from a config is put into code spans and fenced blocks that it cannot end, except for `notes`, which are the
author's own markdown.
"""

import json
import re
import shlex
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .facts import AUTO_CLASSES
from .folders import without_folders
from .known_pairs import BY_NAME, EMBEDDED, NAMES, check_known_name, embedded_folder
from .pair_config import CONFIG_NAME, Measurement, ModelSource, PairConfig


TEMPLATE = Path(__file__).with_name("card.md.jinja")
NOT_CHECKED, NOT_MEASURED = "*not checked*", "*not measured*"
DRAFTING = {  # how drafts without weights propose
    "suffix": "what followed the last tokens where these stood before in the text is proposed",
    "early_exit": "its own first layers propose a few tokens",
}
TEXT, SPEECH, VISION = "AutoModelForCausalLM", "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText"
TASKS = {TEXT: "text-generation", SPEECH: "automatic-speech-recognition", VISION: "image-text-to-text"}
AUTO_NAMES = [each.__name__ for each in AUTO_CLASSES]
PROSE = 'inputs = tokenizer(["Once upon a time"], return_tensors="pt")'
PROCESSED = {  # of models that do not read text alone
    SPEECH: 'inputs = processor(audio, sampling_rate=16000, return_tensors="pt")',
    VISION: 'inputs = processor(images=image, text=prompt, return_tensors="pt")',
}


def render(config: PairConfig, name: str, published: bool = False, title: str | None = None) -> str:
    """The model card of a pair, with front matter; equal arguments give the same text.

    Args:
        config: of the pair. A fact that is None is shown as "not checked", a missing figure as "not measured".
        name: id or folder of its repository, "embedded", or both models' ids for a pair that is not published.
        published: whether its repository has the code to use it, in `custom_generate/`.
        title: what the pair is called; `name` unless given.
    """
    target, draft, title = config.target, config.draft, title or name
    embedded = name == EMBEDDED and not published
    saved = published or any(model.name is None or model.revision is not None for model in (target, draft))
    home = "The two models are in repositories of their own; the package `hf_specx` puts them together."
    if published:
        home = "`custom_generate/` holds the code; transformers runs it with nothing else installed."
    elif saved:
        home = "It is part of the package `hf_specx`." if embedded else "The package `hf_specx` loads it."
    inputs = _inputs(auto_class_of(target), _source(target, name))
    kind = next((kind for kind in DRAFTING if getattr(config, kind) is not None), None)
    shown: dict[str, Any] = {
        "config": config,
        "title": "The embedded pair" if embedded else escaped(title),
        "home": home,
        "published": published,
        "saved": saved,
        "drafting": DRAFTING.get(kind or ""),
        "has_head": config.early_exit is not None and config.early_exit.head,
        "facts": _facts(config, kind),
        "auto_class": auto_class_of(target),
        "inputs": inputs,
        "pair_inputs": PROSE.replace("tokenizer", "pair.tokenizer") if PROSE in inputs else inputs,
        "name": json.dumps(name),
        "target": _source(target, name),
        "draft": _source(draft, name),
        "ids": shlex.join([target.name or "", draft.name or ""]),
        "runs": [_run(list(rows)) for _, rows in groupby(config.measurements, _circumstances)],
        "tokenizers": _tokenizers(config),
        "code": code,
        "row": row,
        "fence": fence,
    }
    card = ModelCard.from_template(_metadata(config, published, title), str(TEMPLATE), **shown)
    return f"{card.content}\n"


def known_card(name: str) -> str:
    """The card of a well-known pair, or of the embedded one; a ValueError for a name that is neither."""
    if name == EMBEDDED:
        return render(PairConfig.from_file(embedded_folder() / CONFIG_NAME), EMBEDDED)
    check_known_name(name)
    return render(BY_NAME[name].config(), BY_NAME[name].title)


def write_cards(folder: str | Path) -> list[Path]:
    """Write the cards of the embedded pair and of all well-known pairs into a folder; returns the files."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    files = [root / f"{name}.md" for name in NAMES]
    for name, file in zip(NAMES, files, strict=True):
        file.write_text(known_card(name), encoding="utf-8")
    return files


def auto_class_of(model: ModelSource) -> str:
    """The class of transformers that loads a model: one that we know, so that examples hold no other text."""
    return str(model.auto_class) if model.auto_class in AUTO_NAMES else TEXT


def _metadata(config: PairConfig, published: bool, title: str) -> ModelCardData:
    """The front matter; speeds are in the form that the Hub calls `model-index`."""
    models, task = (config.target, config.draft), TASKS.get(auto_class_of(config.target))
    speeds = [
        EvalResult(
            task_type=task or "text2text-generation",
            dataset_type="prompts",
            dataset_name="Prompts of the measurement",
            metric_type="speedup",
            metric_name=f"times as fast as plain generate, batch {m.batch}, {m.dtype}, {m.verification}",
            metric_value=round(m.measured_speedup, 2),
        )
        for m in config.measurements
    ]
    return ModelCardData(
        library_name="transformers",
        tags=[*(["custom_generate"] if published else []), "speculative-decoding", "draft-model"],
        pipeline_tag=task,
        license=config.license,
        base_model=list(dict.fromkeys(model.name for model in models if model.name)) or None,
        model_name=title if speeds else None,
        eval_results=speeds or None,
    )


def _facts(config: PairConfig, kind: str | None) -> list[list[str]]:
    """Rows of facts about the target and the draft, which is of this kind if it has no weights."""
    facts = [_of_model(model) for model in (config.target, config.draft)]
    if kind is not None:
        options = {name: value for name, value in vars(getattr(config, kind)).items() if value is not False}
        told = ", ".join(f"{code(name)} {value}" for name, value in options.items())
        facts[1] = dict.fromkeys(facts[1], "-")
        facts[1]["model"] = f"none: {code(type(config.weightless_draft()).__name__)} with {told}"
    return [[name, *(each[name] for each in facts)] for name in facts[0]]


def _of_model(model: ModelSource) -> dict[str, str]:
    folder = f", in {code(model.subfolder)}" if model.subfolder else ""
    unlimited = model.max_positions is None and model.model_type is not None
    return {
        "model": f"{code(model.name) or 'inside'}{folder}",
        "revision": "-" if model.name is None else code(model.revision) or "not pinned",
        "type": _fact(model.model_type),
        "parameters": _fact(model.parameters),
        "logits a position": _fact(model.vocab_size),
        "longest text, tokens": "no limit in its config" if unlimited else _fact(model.max_positions),
        "precision": _fact(model.dtype),
    }


def _fact(value: str | int | None) -> str:
    if value is None:
        return NOT_CHECKED
    return f"{value:,}" if isinstance(value, int) else code(value)


def _circumstances(m: Measurement) -> tuple[str, list[tuple[str, str]], str]:
    return m.hardware, list(m.versions.items()), m.command


def _run(rows: list[Measurement]) -> dict[str, Any]:
    """Measurements that were made by one command on one machine, as the template shows them."""
    hardware, versions, command = _circumstances(rows[0])
    where = ", ".join([code(hardware), *(code(f"{name} {version}") for name, version in versions)])
    return {"where": where, "command": without_folders(command), "rows": map(_figures, rows)}


def _figures(m: Measurement) -> list[str]:
    ratios = m.cost_coefficient, m.tokens_per_round, m.expected_speedup, m.forward_limited_speedup, m.measured_speedup
    shown = [NOT_MEASURED if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    options = [str(m.batch), code(m.dtype), code(m.verification), str(m.num_draft_tokens), code(m.layout)]
    return [*options, f"{m.alpha:.3f}", *shown]


def _tokenizers(config: PairConfig) -> str:
    facts, own = config.tokenizers, config.draft_tokenizer
    if facts is None:
        return NOT_CHECKED
    compared = f"{facts.tokens:,} tokens, compared by {code(facts.method)}"
    if facts.method == "one":
        compared = f"one for both models, {facts.tokens:,} tokens"
    elif facts.method == "content":
        compared = f"the same {facts.tokens:,} tokens with the same ids in both, compared one by one"
    elif facts.method == "own" and own is not None:
        compared = f"{facts.tokens:,} tokens of the target; the draft has a tokenizer of its own with {own.tokens:,}, "
        compared += f"among them {own.overlap:.0%} of the target's"
    return ", ".join([compared, *(f"{code(role)} {code(token)}" for role, token in facts.special_tokens.items())])


def _inputs(auto_class: str, source: str) -> str:
    """Code that makes `inputs`, with its imports."""
    kind = "Processor" if auto_class in PROCESSED else "Tokenizer"
    imported = f"from transformers import {auto_class}, Auto{kind}\n\n"
    return f"{imported}{kind.lower()} = Auto{kind}.from_pretrained({source})\n{PROCESSED.get(auto_class, PROSE)}"


def _source(model: ModelSource, home: str) -> str:
    """The arguments of `from_pretrained` for a model; `home` is the pair's repository, for models inside it."""
    named = {"revision": model.revision, "subfolder": model.subfolder or None}
    given = [f"{name}={json.dumps(value)}" for name, value in named.items() if value is not None]
    return ", ".join([json.dumps(model.name or home), *given])


def escaped(text: str) -> str:
    """Markdown for a text in one line, with all characters escaped that mean something to markdown or HTML."""
    return re.sub(r"([\\`*_\[\]<>#|&~])", r"\\\1", " ".join(text.split()))


def code(text: str | int | None) -> str:
    """A code span in one line; "" for an empty text and for None."""
    line = " ".join(str("" if text is None else text).split())
    ticks = "`" * (_longest_run(line) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{space}{line}{space}{ticks}" if line else ""


def fence(text: str, language: str) -> str:
    """A fenced block."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text.strip()}\n{ticks}"


def row(cells: Iterable[str]) -> str:
    """A row of a table; bars within its cells, which have no line breaks, are escaped."""
    bars = (re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", cell) for cell in cells)
    return f"| {' | '.join(bars)} |"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall(r"`+", text)), default=0)
