"""Model cards: the README.md of a pair's repository, rendered from its config and nothing else.

Text from a config stands in code spans and fenced blocks that it cannot end, but for `notes`, the author's markdown.
"""

import json
import re
import shlex
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_specx.common.drafts import PAIR_CONFIG_NAME
from hf_specx.common.load_model import AUTO_CLASSES
from hf_specx.drafting.heads.config import ARCHITECTURES as HEADS

from .folders import PAIR_CARD_MARKER, check_out, without_folders
from .known_pairs import EMBEDDED, embedded_folder
from .pair_config import ModelSource, PairConfig


TEMPLATE = Path(__file__).with_name("card.md.jinja")
TEXT, SPEECH, VISION = "AutoModelForCausalLM", "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText"
SEQ2SEQ = "AutoModelForSeq2SeqLM"
TASKS = {TEXT: "text-generation", SPEECH: "automatic-speech-recognition", VISION: "image-text-to-text"}


def render(config: PairConfig, name: str, published: bool = False) -> str:
    """The model card of a pair, with front matter; equal arguments give the same text.

    Args:
        config: of the pair. A fact that is None is shown as "not checked", a missing figure as "not measured".
        name: id or folder of its repository, "embedded", or both models' ids for a pair that is not published.
        published: whether its repository has the code to use it, in `custom_generate/`.
    """
    models = (config.target, config.draft)
    weightless = config.suffix or config.early_exit
    by_machine = groupby(config.measurements, lambda m: (m.hardware, m.versions, m.command))
    helpers: dict[str, Any] = {helper.__name__: helper for helper in (code, escaped, fence, row, without_folders)}
    card = ModelCard.from_template(
        _metadata(config, published, name),
        str(TEMPLATE),
        config=config,
        name=name,
        published=published,
        embedded=name == EMBEDDED and not published,
        saved=published or any(model.name is None or model.revision is not None for model in models),
        weightless_class=type(config.weightless_draft()).__name__,
        options=vars(weightless) if weightless else {},
        auto_class=auto_class_of(config.target),
        is_head=config.draft.model_type in HEADS,
        ids=shlex.join([model.name or "" for model in models]),
        runs=[list(measurements) for _, measurements in by_machine],
        json=json.dumps,
        **helpers,
    )
    return f"{card.content}\n"


def embedded_config() -> PairConfig:
    """The config of the pair in the package."""
    return PairConfig.from_file(embedded_folder() / PAIR_CONFIG_NAME)


def embedded_card() -> str:
    """The card of the pair in the package."""
    return render(embedded_config(), EMBEDDED)


def write_embedded_card(folder: str | Path) -> Path:
    """Write the card of the pair in the package into a folder; returns the file."""
    file = Path(folder) / f"{EMBEDDED}.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    check_out(file, PAIR_CARD_MARKER)
    file.write_text(embedded_card(), encoding="utf-8")
    return file


def auto_class_of(model: ModelSource) -> str:
    """The class of transformers that loads a model: one that we know, so that examples hold no other text."""
    names = [auto_class.__name__ for auto_class in AUTO_CLASSES]
    return str(model.auto_class) if model.auto_class in names else TEXT


def _metadata(config: PairConfig, published: bool, name: str) -> ModelCardData:
    """The front matter; speeds are in the form that the Hub calls `model-index`.

    The relations to a base model that the Hub knows are finetune, adapter, quantized, and, with two names, merge.
    """
    target, task = config.target.name, TASKS.get(auto_class_of(config.target))
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
        base_model=target,  # two of them would declare a merge
        base_model_relation=target and "adapter",  # it goes with that model, whose weights stay as they are
        model_name=name if speeds else None,
        eval_results=speeds or None,
    )


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
    """A fenced block of code that the text cannot end."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text.strip()}\n{ticks}"


def row(cells: Iterable[object]) -> str:
    """A row of a table; bars within its cells, which have no line breaks, are escaped."""
    bars = (re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", str(cell)) for cell in cells)
    return f"| {' | '.join(bars)} |"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall(r"`+", text)), default=0)
