"""What happens to one architecture: built, self-consistent under stock, and then exact with us or refused."""

import copy
import math
import sys
from functools import partial
from typing import NamedTuple

import torch
import zoo
from tiny import near
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.common.architectures import INEXACT, LAYOUTS_OF, REFUSED
from hf_specx.engine.report import SpeculationReport
from hf_specx.layouts.choose import DECODERS, layouts_of


NEW_TOKENS, NUM_DRAFT_TOKENS = 24, 3
MODES = {"greedy": {"do_sample": False}, "coupled": {"do_sample": True, "top_k": 0}}
NOISES = (0.05, 0.02, 0.1, 0.01, 0.2, 0.005)  # of near drafts, tried until every outcome was seen


class Outcome(NamedTuple):
    """One row of the table.

    Attributes:
        result: "exact", "refused", "not self-consistent" or "not built".
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
    inconsistent = _inconsistency(model, inputs)
    try:
        layouts = layouts_of(model)
        _check_like_stock(model, inputs)
    except ValueError as error:
        return Outcome("not self-consistent" if inconsistent else "refused", inconsistent or _line(error))
    if inconsistent:
        return Outcome("not self-consistent", inconsistent)
    texts = _stock_texts(model, inputs)
    for layout in layouts:
        _check_exact(model, inputs, layout, texts)
    return Outcome("exact", ", ".join(layouts))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:150]


def _generate(model: PreTrainedModel, inputs: dict, settings: dict, **extra) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(**inputs, **settings, max_new_tokens=NEW_TOKENS, **extra)


def _inconsistency(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> str:
    """Why stock's batched output cannot be compared with; empty where it can."""
    try:
        together = _generate(model, inputs, MODES["greedy"])
        for row, text in enumerate(together):
            alone = {name: value[row : row + 1] for name, value in inputs.items()}
            if "input_ids" in inputs and not model.config.is_encoder_decoder:
                length = int(inputs["attention_mask"][row].sum())
                alone |= {name: alone[name][:, -length:] for name in ("input_ids", "attention_mask")}
            if not torch.equal(_generate(model, alone, MODES["greedy"])[0, -NEW_TOKENS:], text[-NEW_TOKENS:]):
                return f"stock gives row {row} another text in a batch than alone"
            if len(set(text[-NEW_TOKENS:].tolist())) < 5:
                return f"row {row} has fewer than 5 distinct tokens"
    except Exception as error:  # a model that stock cannot generate with
        return _line(error)
    return ""


def _check_like_stock(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> None:
    """Also where stock itself gives a row another text in a batch than alone, ours in that batch is stock's."""
    try:
        expected = _generate(model, inputs, MODES["greedy"])
    except Exception:  # stock cannot generate with it
        return
    output = _generate(model, inputs, MODES["greedy"], custom_generate=_strategy(near(model, 0.02), "auto"))
    assert torch.equal(output, expected), "another text than stock's, which is not self-consistent"


def _strategy(draft: PreTrainedModel, layout: str) -> SpeculativeDecoding:
    return SpeculativeDecoding(draft, num_draft_tokens=NUM_DRAFT_TOKENS, verification="coupled", layout=layout)


class Texts(NamedTuple):
    """What plain `generate` writes: [rows, length] by mode, and sampled with end tokens, which are in `ends`."""

    free: dict[str, torch.Tensor]
    ends: dict[str, object]
    ended: torch.Tensor


def _stock_texts(model: PreTrainedModel, inputs: dict) -> Texts:
    free = {mode: _generate(model, inputs, settings) for mode, settings in MODES.items()}
    text = free["coupled"][:, -NEW_TOKENS:]
    ends = MODES["coupled"] | {"eos_token_id": [int(text[0, 6]), int(text[1, 11])], "pad_token_id": 0}
    return Texts(free, ends, _ending(model, inputs, ends))


def _ending(model: PreTrainedModel, inputs: dict, settings: dict, **extra) -> torch.Tensor:
    config = copy.deepcopy(model.generation_config)
    output = _generate(model, inputs, settings, **extra)
    model.generation_config = config  # Pop2Piano notes the end ids in its own
    return output


def _check_exact(model: PreTrainedModel, inputs: dict, layout: str, texts: Texts) -> None:
    most = math.ceil((NEW_TOKENS - 1) / (NUM_DRAFT_TOKENS + 1))
    twin = near(model, 0.0)  # before the hook, which a copy would have too
    for mode, settings in MODES.items():
        forwards: list[None] = []
        handle = model.register_forward_pre_hook(partial(_count, forwards))
        output = _generate(model, inputs, settings, custom_generate=_strategy(twin, layout))
        handle.remove()
        assert torch.equal(output, texts.free[mode]), f"{layout}, {mode}, equal draft: another text"
        assert len(forwards) - 1 <= most, f"{layout}, {mode}: {len(forwards) - 1} forwards with an equal draft"
    seen: set[str] = set()
    for noise in NOISES:
        draft = near(model, noise)
        for mode, settings in MODES.items():
            strategy = _strategy(draft, layout)
            output = _generate(model, inputs, settings, custom_generate=strategy)
            assert torch.equal(output, texts.free[mode]), f"{layout}, {mode}, noise {noise}: another text"
            seen |= outcomes(strategy.report)
        if len(seen) == 3:
            break
    assert len(seen) == 3, f"{layout}: of all outcomes only {sorted(seen)}"
    # rows that end at different steps leave the batch, and the others go on
    output = _ending(model, inputs, texts.ends, custom_generate=_strategy(near(model, 0.02), layout))
    assert torch.equal(output, texts.ended), f"{layout}: another text where rows end early"


def _count(forwards: list[None], *_: object) -> None:
    forwards.append(None)


def outcomes(report: SpeculationReport) -> set[str]:
    """Which of the three things that can happen in a round have happened."""
    rounds = [record for history in report.history for record in history if record.drafted]
    seen = {"rejection" for record in rounds if record.accepted < record.drafted}
    seen |= {"full acceptance" for record in rounds if record.accepted == record.drafted}
    together = zip(*(history for history in report.history), strict=False)
    return seen | {"unequal counts" for records in together if len({r.accepted for r in records}) > 1}


def discover(kind: str, model_type: str) -> str | None:
    """All layouts in which a type is exact, whatever hf_specx/abilities.py says; None where there is no model."""
    try:
        model = zoo.build(kind, model_type)
        inputs = zoo.inputs(model)
        if _inconsistency(model, inputs):
            return None
    except Exception:
        return None
    able, texts = [], _stock_texts(model, inputs)
    known = dict(LAYOUTS_OF), dict(INEXACT), dict(REFUSED)
    LAYOUTS_OF.clear(), INEXACT.clear(), REFUSED.clear()
    LAYOUTS_OF[model.config.model_type] = tuple(DECODERS)
    for layout in DECODERS:
        try:
            _check_exact(model, inputs, layout, texts)
            able.append(layout)
        except Exception as error:
            print(kind, model_type, layout, _line(error), file=sys.stderr)
    for table, was in zip((LAYOUTS_OF, INEXACT, REFUSED), known, strict=True):
        table.clear()
        table.update(was)
    return " ".join(able)
