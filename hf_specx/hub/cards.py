"""Model cards: the README.md of a pair's repository, rendered from its config and nothing else.

The sections are those of the Hub's own repositories with a `custom_generate` folder. Text from a config is put into
code spans and fenced blocks that it cannot end, except for `notes`, which are the author's own markdown.
"""

from itertools import groupby
from pathlib import Path

from huggingface_hub import ModelCardData

from hf_specx.hub.known_pairs import BY_NAME, EMBEDDED, NAMES, check_known_name, embedded_folder
from hf_specx.pair_files.pair_config import (
    CONFIG_NAME,
    DraftTokenizer,
    Measurement,
    ModelSource,
    PairConfig,
    TokenizerFacts,
    WeightlessDraft,
)

from .card_usage import SPEECH, VISION, Card, usage
from .markdown import code, escaped, fence, row


NOT_CHECKED, NOT_MEASURED = "*not checked*", "*not measured*"
DRAFTING = {  # how drafts without weights propose, and where they serve
    "suffix": ("what followed the last tokens where these stood before in the text is proposed", "any target"),
    "early_exit": ("its own first layers propose a few tokens", "targets whose layers are one list"),
}
TAGS = ("speculative-decoding", "draft-model")
TASKS = {
    "AutoModelForCausalLM": "text-generation",
    SPEECH: "automatic-speech-recognition",
    VISION: "image-text-to-text",
}
HEADER = (
    "| batch | dtype | verification | drafts a round | layout | α | c | tokens a row and round | "
    "expected (Theorem 3.8) | limited by the forwards | measured |\n"
    "| ---: | --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def render(config: PairConfig, name: str, published: bool = False, title: str | None = None) -> str:
    """The model card of a pair, with front matter; equal arguments give the same text.

    Args:
        config: of the pair. A fact that is None is shown as "not checked", a missing figure as "not measured".
        name: id or folder of its repository, "embedded", or both models' ids for a pair that is not published.
        published: whether its repository has the code to use it, in `custom_generate/`.
        title: what the pair is called; `name` unless given.
    """
    card = Card(config, name, published, title or name)
    sections = [
        _front_matter(card),
        f"# {_title(card)}",
        _description(card),
        _base_model(card),
        _compatibility(card),
        _arguments(config),
        "## Output Type changes\n\nNone. With `return_dict_in_generate=True` the output has one attribute more, "
        "`speculation_report`: acceptance, tokens a round, predicted speed-up, times.",
        usage(card),
        _measured(card),
        _checks(config),
        _licence(config),
        config.notes.strip(),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def known_card(name: str) -> str:
    """The card of a pair in `KNOWN_PAIRS`, or of the embedded one.

    Raises:
        ValueError: for a name that is neither.
    """
    if name == EMBEDDED:
        return render(PairConfig.from_file(embedded_folder() / CONFIG_NAME), EMBEDDED)
    check_known_name(name)
    return render(BY_NAME[name].config(), BY_NAME[name].title)


def write_cards(folder: str | Path) -> list[Path]:
    """Write the cards of the embedded pair and of all well-known pairs into a folder, which is made if it is missing.

    Returns:
        The files, one for each pair.
    """
    cards = {f"{name}.md": known_card(name) for name in NAMES}
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    for file, text in cards.items():
        (root / file).write_text(text, encoding="utf-8")
    return [root / file for file in cards]


def _front_matter(card: Card) -> str:
    models = (card.config.target, card.config.draft)
    data = ModelCardData(
        library_name="transformers",
        tags=[*(["custom_generate"] if card.published else []), *TAGS],
        pipeline_tag=TASKS.get(card.auto_class),
        license=card.config.license,
        base_model=list(dict.fromkeys(model.name for model in models if model.name)) or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _title(card: Card) -> str:
    return "The embedded pair" if card.embedded else escaped(card.title)


def _description(card: Card) -> str:
    text = (
        "## Description\n\nA draft-target pair for speculative sampling: the small draft proposes a few tokens, the "
        "target judges all of them in one forward, and the text has exactly the target's distribution (with "
        "`do_sample=False` it is the target's greedy text), at any batch size."
    )
    kind, _ = _weightless(card.config)
    if kind is not None:
        text = text.replace("the small draft proposes a few tokens, the target", f"{DRAFTING[kind][0]}, the target")
    if card.embedded:
        return f"{text} It is part of the package `hf_specx`."
    if card.published:
        return f"{text} `custom_generate/` holds the code; transformers runs it with nothing else installed."
    if card.saved:
        return f"{text} The package `hf_specx` loads it."
    return f"{text} The two models are in repositories of their own; the package `hf_specx` puts them together."


def _base_model(card: Card) -> str:
    target, draft = card.config.target, card.config.draft
    rows = [
        ("model", _location(target), _location(draft)),
        ("revision", _revision(target), _revision(draft)),
        ("type", _fact(target.model_type), _fact(draft.model_type)),
        ("parameters", _fact(target.parameters), _fact(draft.parameters)),
        ("logits a position", _fact(target.vocab_size), _fact(draft.vocab_size)),
        ("longest text, tokens", _longest(target), _longest(draft)),
        ("precision", _fact(target.dtype), _fact(draft.dtype)),
    ]
    kind, draft_without = _weightless(card.config)
    if kind is not None:
        known = {name: value for name, value in vars(getattr(card.config, kind)).items() if value is not False}
        options = ", ".join(f"{code(name)} {value}" for name, value in known.items())
        rows = [(name, of_target, "-") for name, of_target, _ in rows]
        rows[0] = (*rows[0][:2], f"none: {code(type(draft_without).__name__)} with {options}")
    return "\n".join(["## Base model\n\n| | target | draft |\n| --- | --- | --- |", *map(row, rows)])


def _compatibility(card: Card) -> str:
    needs = (
        "What it needs is in `custom_generate/requirements.txt`."
        if card.published
        else "It needs the package `hf_specx`."
    )
    kind, _ = _weightless(card.config)
    if kind is not None:
        has_head = card.config.early_exit is not None and card.config.early_exit.head
        weights = "no weights but those of its head" if has_head else "no weights"
        serves = f"The draft has {weights}, and serves {'this target' if has_head else DRAFTING[kind][1]}"
        return f"## Model compatibility\n\nThe model above. {serves}. {needs}"
    others = "whose tokenizer has the same tokens with the same ids, such as fine-tuned versions of this one"
    if card.config.draft_tokenizer is not None:
        others = "with any tokenizer"
    return (
        f"## Model compatibility\n\nThe two models above. The draft also serves other targets {others}; how much of "
        f"it they accept is to be measured. {needs}"
    )


def _weightless(config: PairConfig) -> tuple[str | None, WeightlessDraft | None]:
    """The field of a draft that has no weights, and this draft; None if there is a model."""
    return next((name for name in DRAFTING if getattr(config, name) is not None), None), config.weightless_draft()


def _arguments(config: PairConfig) -> str:
    given = {
        "num_draft_tokens": (config.num_draft_tokens, "candidates a round, or `auto`"),
        "verification": (
            config.verification,
            "`block` (`None`, if it can), `token`, or `coupled`: the tokens of plain sampling",
        ),
        "layout": (config.layout, "how rows of unequal length share a batch"),
    }
    rows = [
        (f"`{name}`", code("None" if value is None else str(value)), meaning)
        for name, (value, meaning) in given.items()
    ]
    rows += [
        ("`draft_model`", "the draft above", "another draft, loaded; `assistant_model` is the same"),
        ("`seeds`", "`None`", "one int a row, which makes rows independent of each other"),
    ]
    return "\n".join(
        [
            "## Additional Arguments\n\nBesides everything that `generate` takes:\n\n"
            "| argument | for this pair | meaning |\n| --- | --- | --- |",
            *map(row, rows),
        ]
    )


def _measured(card: Card) -> str:
    """One table for each machine, versions and command, in the order of the config."""
    measurements = card.config.measurements
    if not measurements:
        return f"## Measured\n\n{NOT_MEASURED}."
    blocks = [
        "## Measured\n\nMedians over runs, in turns with plain `generate` on the same batch. The last column is how "
        "many times as fast it was, the two before it what theory and the times of bare forwards let one expect. "
        "Numbers from other machines differ."
    ]
    for (hardware, versions, command), rows in groupby(measurements, _circumstances):
        told = ", ".join(code(f"{name} {version}") for name, version in versions)
        blocks += [f"On {code(hardware)}{', ' if told else ''}{told}:", "\n".join([HEADER, *map(_figures, rows)])]
        blocks.append(fence(command, "bash"))
    return "\n\n".join(blocks)


def _circumstances(measurement: Measurement) -> tuple[str, tuple[tuple[str, str], ...], str]:
    return measurement.hardware, tuple(measurement.versions.items()), measurement.command


def _figures(m: Measurement) -> str:
    ratios = (m.tokens_per_round, m.expected_speedup, m.forward_limited_speedup, m.measured_speedup)
    return row(
        (
            str(m.batch),
            code(m.dtype),
            code(m.verification),
            str(m.num_draft_tokens),
            code(m.layout),
            f"{m.alpha:.3f}",
            *(NOT_MEASURED if ratio is None else f"{ratio:.2f}" for ratio in (m.cost_coefficient, *ratios)),
        )
    )


def _checks(config: PairConfig) -> str:
    lines = [
        "## How it was checked, and limits\n",
        f"- Tokenizers: {_tokenizers(config.tokenizers, config.draft_tokenizer)}.",
        "- Beams and other modes of generation, and whatever could not be done exactly, raise a `ValueError`.",
        "- Whether it is faster depends on machine, batch size and text; the report of a call says what to expect.",
        "- In half precision a forward over several tokens rounds differently from one over a single token, so greedy "
        "and coupled text may part from that of plain `generate` after many tokens.",
    ]
    return "\n".join(lines)


def _tokenizers(facts: TokenizerFacts | None, own: DraftTokenizer | None) -> str:
    if facts is None:
        return NOT_CHECKED
    if facts.method == "one":
        compared = f"one for both models, {facts.tokens:,} tokens"
    elif facts.method == "content":
        compared = f"the same {facts.tokens:,} tokens with the same ids in both, compared one by one"
    elif facts.method == "own":
        compared = f"{facts.tokens:,} tokens of the target; the draft has a tokenizer of its own"
        if own is not None:
            compared += f" with {own.tokens:,}, among them {own.overlap:.0%} of the target's"
    else:
        compared = f"{facts.tokens:,} tokens, compared by {code(facts.method)}"
    return ", ".join([compared, *(f"{code(role)} {code(token)}" for role, token in facts.special_tokens.items())])


def _licence(config: PairConfig) -> str:
    stated = NOT_CHECKED if config.license is None else code(config.license)
    rest = ""
    if config.target.name or config.draft.name:
        rest = " The models that are named by id have licences of their own."
    return f"## Licence\n\n{stated}.{rest}"


def _location(model: ModelSource) -> str:
    folder = f", in {code(model.subfolder)}" if model.subfolder else ""
    return f"{code(model.name) if model.name else 'inside'}{folder}"


def _revision(model: ModelSource) -> str:
    if model.name is None:
        return "-"
    return code(model.revision) if model.revision else "not pinned"


def _longest(model: ModelSource) -> str:
    unlimited = model.max_positions is None and model.model_type is not None
    return "no limit in its config" if unlimited else _fact(model.max_positions)


def _fact(value: str | int | None) -> str:
    if value is None:
        return NOT_CHECKED
    return f"{value:,}" if isinstance(value, int) else code(value)
