"""What happens to one architecture: built, self-consistent under stock, and then exact with us or refused."""

import copy
import math
import sys
from contextlib import ExitStack
from typing import NamedTuple
from unittest.mock import patch

import torch
import zoo
from counting import counting
from tiny import near
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.common.architectures import INEXACT, LAYOUTS_OF, REFUSED
from hf_specx.engine.report import SpeculationReport
from hf_specx.models.choose import RUNNERS, layouts_of, why_no_layout


NEW_TOKENS, NUM_DRAFT_TOKENS = 24, 3
MODES = {"greedy": {"do_sample": False}, "coupled": {"do_sample": True, "top_k": 0}}
NOISES = (0.05, 0.02, 0.1, 0.01, 0.2, 0.005)  # of near drafts, tried until every outcome was seen


class Outcome(NamedTuple):
    """One row of the table.

    Attributes:
        result: "exact", "plain", "not self-consistent" or "not built".
        note: the layouts in which it is exact, best first; or why it is not.
    """

    result: str
    note: str


def examine(kind: str, model_type: str) -> Outcome:
    """
    Raises:
        AssertionError: where our output differs from stock's, or was not speculative.
    """
    try:
        model = zoo.build(kind, model_type)
    except Exception as error:  # whatever transformers says of a config it cannot build from
        return Outcome("not built", _line(error))
    inputs = zoo.inputs(model)
    inconsistent, greedy = _by_stock(model, inputs)
    why = why_no_layout(model)
    layout = _check_like_stock(model, inputs, greedy) if greedy is not None else ""
    if inconsistent:
        return Outcome("not self-consistent", inconsistent)
    if why:
        assert layout == "plain"
        for mode, text in _stock_texts(model, inputs, greedy).items():
            _compared(model, inputs, text, _strategy(near(model, 0.02), "auto"), f"plain, {mode}")
        return Outcome("plain", why.partition(" of speculative decoding: ")[2].removesuffix("; choose another"))
    # a type that is in no table has the layout that was measured
    layouts = layouts_of(model) if model.config.model_type in LAYOUTS_OF else [layout]
    assert layout == layouts[0]
    texts, noises = _stock_texts(model, inputs, greedy), None
    for layout in layouts:
        noises = _check_exact(model, inputs, layout, texts, noises)
    return Outcome("exact", ", ".join(layouts))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:150]


def _generate(model: PreTrainedModel, inputs: dict, settings: dict, **extra) -> torch.Tensor:
    config = copy.deepcopy(model.generation_config)
    torch.manual_seed(0)
    output = model.generate(**inputs, **settings, max_new_tokens=NEW_TOKENS, **extra)
    model.generation_config = config  # Pop2Piano notes the end ids in its own
    return output


def _by_stock(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> tuple[str, torch.Tensor | None]:
    """Why stock's batched output cannot be compared with, empty where it can; and its greedy text, if there is any."""
    together = None
    try:
        together = _generate(model, inputs, MODES["greedy"])
        for row, text in enumerate(together):
            alone = {name: value[row : row + 1] for name, value in inputs.items()}
            if "input_ids" in inputs and not model.config.is_encoder_decoder:
                length = int(inputs["attention_mask"][row].sum())
                alone |= {name: alone[name][:, -length:] for name in ("input_ids", "attention_mask")}
            if not torch.equal(_generate(model, alone, MODES["greedy"])[0, -NEW_TOKENS:], text[-NEW_TOKENS:]):
                return f"plain generate gives row {row} another text in a batch than alone", together
            if len(set(text[-NEW_TOKENS:].tolist())) < 5:
                return f"row {row} has fewer than 5 distinct tokens", together
    except Exception as error:  # a model that stock cannot generate with
        return _line(error), together
    return "", together


def _check_like_stock(model: PreTrainedModel, inputs: dict, greedy: torch.Tensor) -> str:
    """The layout; also where stock itself gives a row another text in a batch than alone, ours there is stock's."""
    strategy = _strategy(near(model, 0.02), "auto")
    output = _generate(model, inputs, MODES["greedy"], custom_generate=strategy)
    assert torch.equal(output, greedy), "another text than stock's"
    return strategy.report.layout


def _strategy(draft: PreTrainedModel, layout: str) -> SpeculativeDecoding:
    return SpeculativeDecoding(draft, num_draft_tokens=NUM_DRAFT_TOKENS, verification="coupled", layout=layout)


class Text(NamedTuple):
    """What plain `generate` writes by some settings: [rows, length]."""

    settings: dict
    expected: torch.Tensor


def _stock_texts(model: PreTrainedModel, inputs: dict, greedy: torch.Tensor) -> dict[str, Text]:
    """By mode; in "ends" rows leave the batch at different steps, and the others go on."""
    sampled = _generate(model, inputs, MODES["coupled"])
    new = sampled[:, -NEW_TOKENS:]
    ends = MODES["coupled"] | {"eos_token_id": [int(new[0, 6]), int(new[1, 11])], "pad_token_id": 0}
    ended = _generate(model, inputs, ends)
    texts = {"greedy": Text(MODES["greedy"], greedy), "coupled": Text(MODES["coupled"], sampled)}
    return texts | {"ends": Text(ends, ended)}


def _check_exact(
    model: PreTrainedModel, inputs: dict, layout: str, texts: dict[str, Text], noises: list[float] | None = None
) -> list[float]:
    """In every mode; in a further layout, which is given `noises`, the text that ends serves for the sampled one.

    Returns:
        `noises` for the next layout: first the one with which every outcome was seen.
    """
    further = noises is not None
    most = math.ceil((NEW_TOKENS - 1) / (NUM_DRAFT_TOKENS + 1))
    twin = near(model, 0.0)  # before the hook, which a copy would have too
    for mode in ("coupled",) if further else ("greedy", "coupled"):
        with counting(model) as forwards:
            _compared(model, inputs, texts[mode], _strategy(twin, layout), f"{layout}, {mode}, equal draft")
        assert len(forwards) - 1 <= most, f"{layout}, {mode}: {len(forwards) - 1} forwards with an equal draft"
    seen: set[str] = set()
    for noise in noises or NOISES:
        draft = near(model, noise)
        for mode in ("greedy", "ends") if further else texts:
            strategy = _strategy(draft, layout)
            _compared(model, inputs, texts[mode], strategy, f"{layout}, {mode}, noise {noise}")
            seen |= outcomes(strategy.report)
        if len(seen) == 3:
            return [noise, *(other for other in NOISES if other != noise)]
    raise AssertionError(f"{layout}: of all outcomes only {sorted(seen)}")


def _compared(model: PreTrainedModel, inputs: dict, text: Text, strategy: SpeculativeDecoding, case: str) -> None:
    output = _generate(model, inputs, text.settings, custom_generate=strategy)
    assert torch.equal(output, text.expected), f"{case}: another text"


def outcomes(report: SpeculationReport) -> set[str]:
    """Which of the three things that can happen in a round have happened."""
    rounds = [record for history in report.history for record in history if record.drafted]
    seen = {"rejection" for record in rounds if record.accepted < record.drafted}
    seen |= {"full acceptance" for record in rounds if record.accepted == record.drafted}
    together = zip(*(history for history in report.history), strict=False)
    return seen | {"unequal counts" for records in together if len({r.accepted for r in records}) > 1}


def discover(kind: str, model_type: str) -> str | None:
    """All layouts in which a type is exact, whatever common/architectures.py says; None where there is no model."""
    try:
        model = zoo.build(kind, model_type)
        inputs = zoo.inputs(model)
        inconsistent, greedy = _by_stock(model, inputs)
        if inconsistent:
            return None
    except Exception:
        return None
    able, texts = [], _stock_texts(model, inputs, greedy)
    with ExitStack() as stack:
        every = {model.config.model_type: tuple(RUNNERS)}
        for table, known in ((LAYOUTS_OF, every), (INEXACT, {}), (REFUSED, {})):
            stack.enter_context(patch.dict(table, known, clear=True))
        for layout in RUNNERS:
            try:
                _check_exact(model, inputs, layout, texts)
                able.append(layout)
            except Exception as error:
                print(kind, model_type, layout, _line(error), file=sys.stderr)
    return " ".join(able)
