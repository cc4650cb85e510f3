"""Every kind of call on an emulated accelerator: the text of the CPU, and little that a device would have to wait for.

What a call takes for a round is the difference of a long and a short one, so what it takes once does not count.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import zoo
from accelerator import emulated, on_device
from automaton import Automaton
from collectors import RowCollector
from defaults import defaults
from gemma4_models import assistant_of, gemma4_target
from head_files import random_head, write
from rounds import numbers
from tiny import VOCAB_SIZE, near, prompts, tiny
from transformers import PreTrainedModel, SynthIDTextWatermarkingConfig

from hf_specx import DraftHead, EarlyExitDraft, Request, SpeculativeDecoding, SuffixDraft, ThinkingBudget


MOST = 1.5  # waits of a round, and as many blocking sends
SHORT, LONG = 8, 36
LAYOUTS = ("ragged", "padded", "packed", "lockstep")
SAMPLED = {"do_sample": True, "top_k": 20}
SEEDS = [5, 6, 7]


@dataclass
class Kind:
    """A kind of call: `model` is the family of both models, and `many` says whether it is a queue of requests.

    Where it `reads` candidates, each position of a draft is waited for once more, as the next one is chosen by what
    is looked up on the host: a grammar follows the text there.
    What is callable in `options`, of the strategy, and in `settings`, of the call, is made anew for each call.
    """

    model: str = "llama"
    draft: Callable[[PreTrainedModel], Any] = lambda model: model
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=lambda: SAMPLED)
    many: bool = False
    reads: bool = False

    def __call__(self, target: Any, draft: Any, inputs: dict, tokens: int) -> tuple[list, int, int]:
        """The texts of up to `tokens` new tokens, the rounds that they took, and the positions of candidates."""
        positions = numbers()
        strategy = SpeculativeDecoding(self.draft(draft), **{"num_draft_tokens": 3} | called(self.options))
        strategy.listeners = (*strategy.listeners, positions)
        settings = called(self.settings) | {"max_new_tokens": tokens, "pad_token_id": 0}
        torch.manual_seed(3)
        if self.many:
            ids = [
                row[mask.bool()].tolist() for row, mask in zip(*map(torch.Tensor.cpu, inputs.values()), strict=True)
            ]
            asked = [Request(text, seed=number) for number, text in enumerate(2 * ids)]
            done = strategy.generate_many(target, asked, batch_size=3, **settings)
            texts = [one.tokens for one in sorted(done, key=lambda one: one.index)]
        else:
            output = target.generate(**inputs, **settings, custom_generate=strategy)
            texts = (output if isinstance(output, torch.Tensor) else output.sequences).tolist()
        return texts, len(positions), sum(positions)


def called(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value() if callable(value) else value for name, value in settings.items()}


HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "dspark": {},
    "domino": {},
    "dflash2": {"draft_vocab": None},
    "dflash causal": {"causal": True, "extra": {"is_causal": True}},
    "eagle3 with windows": {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "window": 4},
}


@cache
def models(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    if name in ("t5", "bart", "m2m_100"):
        target = zoo.build("seq2seq", name)
        return target, near(target, 0.25)
    if name == "gemma4":
        target = gemma4_target("E2B", vocab_size=VOCAB_SIZE, vocab_size_per_layer_input=VOCAB_SIZE)
        return target, assistant_of(target)
    if name in HEADS:
        target = tiny(num_hidden_layers=4)
        head = random_head(name.split()[0], layer_ids=(1, 2, 3), **{"draft_vocab": 24} | HEADS[name])
        with TemporaryDirectory() as folder:
            return target, DraftHead.from_pretrained(write(head, Path(folder)), target=target)
    changes = {"three layers": {"num_hidden_layers": 3}, "few tokens": {"vocab_size": 12}}
    target = tiny(**changes.get(name, {}))
    return target, near(target, 0.05)


def holds(kind: Kind) -> None:
    """The same text as on the CPU, within the bounds."""
    pair, inputs = models(kind.model), prompts(3)
    inputs["input_ids"] %= pair[0].config.vocab_size
    expected, *_ = kind(*pair, inputs, LONG)
    taken = []
    with emulated():
        moved, there = [on_device(model) for model in pair], {name: x.to("cuda:0") for name, x in inputs.items()}
    for tokens in (SHORT, LONG):
        with emulated() as device:
            texts, *counts = kind(*moved, there, tokens)
        taken.append((device, *counts))
    assert texts == expected
    (short, *few), (long, *many) = taken
    rounds, positions = (more - fewer for more, fewer in zip(many, few, strict=True))
    assert rounds >= 4
    for what, most in (("waits", MOST * rounds + kind.reads * positions), ("sends", MOST * rounds)):
        total = getattr(long, what).total() - getattr(short, what).total()
        message = f"{total} {what} in {rounds} rounds with {positions} positions"
        assert total <= most, f"{message}: {(getattr(long, what) - getattr(short, what)).most_common(5)}"


class Never:
    """A criterion of the text that stops no row."""

    stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] < 0


def of_all(row: int, text: torch.Tensor) -> list[int]:
    """A prefix function that allows any token."""
    return list(range(VOCAB_SIZE))


GREEDY = {"do_sample": False}
COUPLED = {"verification": "coupled"}
TREE = {"tree": 12}
MASKS = {"logits_processor": lambda: [Automaton(VOCAB_SIZE, 11, states=2, always=7)]}
SYNTHID = {"watermarking_config": lambda: SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)}
OF_FEW = {"logits_processor": lambda: [Automaton(12, 11, states=2, always=7)]}  # no whole bytes
THINKING = {"logits_processor": lambda: [ThinkingBudget(5, end=[9, 8], message=[6])]}
SUFFIX_OR_MODEL = lambda model: [SuffixDraft(), model]  # noqa: E731
KINDS = {f"{layout}, greedy": Kind(options={"layout": layout}, settings=GREEDY) for layout in LAYOUTS}
KINDS |= {
    f"{layout}, {verification}": Kind(options={"layout": layout, "verification": verification})
    for layout in LAYOUTS
    for verification in ("coupled", "block")
}
KINDS |= {
    "t5 padded": Kind("t5", options={"layout": "padded"}),
    "t5 lockstep": Kind("t5", options={"layout": "lockstep"}, settings=GREEDY),
    "bart lockstep": Kind("bart", options={"layout": "lockstep"}),
    "m2m_100 lockstep": Kind("m2m_100", options={"layout": "lockstep"}, settings=GREEDY),
    "token": Kind(options={"verification": "token"}),
    "suffix": Kind("few tokens", lambda model: SuffixDraft(), settings=GREEDY),
    "early exit": Kind("three layers", lambda model: EarlyExitDraft(2)),
    "list": Kind("few tokens", SUFFIX_OR_MODEL),
    "list, coupled": Kind("few tokens", SUFFIX_OR_MODEL, COUPLED),
    "masks": Kind(settings=GREEDY | MASKS, reads=True),
    "masks, sampled": Kind("few tokens", settings=SAMPLED | OF_FEW, reads=True),
    "masks, suffix": Kind("few tokens", lambda model: SuffixDraft(), settings=GREEDY | OF_FEW),
    "masks of functions, queue": Kind(
        many=True, settings=SAMPLED | {"prefix_allowed_tokens_fn": lambda: of_all}, reads=True
    ),
    "thinking, queue": Kind(many=True, settings=GREEDY | THINKING, reads=True),
    "masks and synthid": Kind(settings=SAMPLED | MASKS | SYNTHID, reads=True),
    "length penalty": Kind(settings=SAMPLED | {"exponential_decay_length_penalty": (2, 1.01), "eos_token_id": 7}),
    "processors": Kind(
        settings=SAMPLED
        | {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[3], [4, 5]], "min_new_tokens": 5}
        | {"suppress_tokens": [6], "eos_token_id": 7, "forced_eos_token_id": 7}
    ),
    "synthid": Kind(settings=SAMPLED | SYNTHID),
    "synthid, queue": Kind(many=True, settings=SAMPLED | SYNTHID),
    "warpers": Kind(settings={"do_sample": True, "temperature": 1.2, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95}),
    "criterion": Kind(settings=SAMPLED | {"stopping_criteria": lambda: [Never()]}),
    "queue, criterion": Kind(many=True, settings=GREEDY | {"eos_token_id": 7, "stopping_criteria": lambda: [Never()]}),
    "queue": Kind(many=True, settings=SAMPLED | {"eos_token_id": 7}),
    "queue, greedy": Kind(many=True, settings=GREEDY),
    "seeds": Kind(settings=SAMPLED | {"seeds": SEEDS}),
    "seeds, coupled": Kind(settings=SAMPLED | {"seeds": SEEDS}, options=COUPLED),
    "eagle3": Kind("eagle3"),
    "eagle3, queue": Kind("eagle3", many=True, settings=SAMPLED | {"eos_token_id": 7}),
    "dspark": Kind("dspark"),
    "dspark, seeds": Kind("dspark", settings=SAMPLED | {"seeds": SEEDS}, options=COUPLED),
    "domino": Kind("domino"),
    "domino, queue": Kind("domino", many=True, settings=SAMPLED | {"eos_token_id": 7}),
    "dflash causal": Kind("dflash causal"),
    "eagle3 with windows": Kind("eagle3 with windows", options=COUPLED),
    "dflash2": Kind("dflash2"),
    "dflash2, seeds": Kind("dflash2", settings=SAMPLED | {"seeds": SEEDS}, options=COUPLED),
    "dflash2, queue": Kind("dflash2", many=True, settings=SAMPLED | {"eos_token_id": 7}),
    "gemma4 assistant": Kind("gemma4"),
    "gemma4 assistant, padded": Kind("gemma4", options={"layout": "padded"}),
    "gemma4 assistant, packed": Kind("gemma4", options={"layout": "packed"} | COUPLED),
    "gemma4 assistant, queue": Kind("gemma4", many=True, settings=SAMPLED | {"eos_token_id": 7}),
    "streamer": Kind(options={"streamer": RowCollector}),
    "trees, greedy": Kind(options=TREE, settings=GREEDY),
    "trees, sampled": Kind(options=TREE),
    "trees, queue": Kind(options=TREE | {"num_draft_tokens": 1}, many=True, settings=SAMPLED | {"eos_token_id": 7}),
    "trees, seeds": Kind(options=TREE, settings=SAMPLED | {"seeds": SEEDS}),
    "trees, masks": Kind(options=TREE, settings=GREEDY | MASKS, reads=True),
    "trees, synthid": Kind(options=TREE, settings=SAMPLED | SYNTHID),
    "trees, processors": Kind(
        options=TREE, settings=SAMPLED | {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[3]]}
    ),
    "trees, list": Kind("few tokens", SUFFIX_OR_MODEL, TREE),
    "trees, early exit": Kind("three layers", lambda model: EarlyExitDraft(2), TREE),
    "trees, eagle3": Kind("eagle3", options=TREE),
    "trees, eagle3, queue": Kind("eagle3", options=TREE, many=True, settings=SAMPLED | {"eos_token_id": 7}),
    "trees, dspark": Kind("dspark", options=TREE),
    "trees, dflash": Kind("dflash", options=TREE),
    "trees, gemma4 assistant": Kind("gemma4", options=TREE),
    "trees, suffix": Kind("few tokens", lambda model: SuffixDraft(), TREE, GREEDY),
}


# what each of these would see of a layout or of a draft, two others see
SLOW_KINDS = ["padded, greedy", "padded, block", "packed, greedy", "packed, coupled", "lockstep, coupled"]
SLOW_KINDS += ["lockstep, block", "ragged, coupled", "t5 lockstep", "bart lockstep", "masks, sampled", "synthid"]
SLOW_KINDS += ["queue", "seeds", "list", "criterion", "eagle3", "dspark", "domino", "dflash2", "dflash2, seeds"]
SLOW_KINDS += ["gemma4 assistant", "gemma4 assistant, padded", "gemma4 assistant, packed"]
SLOW_KINDS += ["trees, greedy", "trees, eagle3"]
SLOW_DEFAULTS = [*SLOW_KINDS, "ragged, greedy", "m2m_100 lockstep", "masks, suffix", "dflash causal"]
SLOW_DEFAULTS += ["eagle3 with windows", "masks of functions, queue", "queue, greedy", "trees, queue", "trees, seeds"]
SLOW_DEFAULTS += ["trees, processors", "trees, dflash", "trees, suffix"]


def partly_slow(slow: list[str]) -> list[Any]:
    """All kinds of calls, of which some are marked as slow."""
    return [pytest.param(kind, marks=[pytest.mark.slow] if kind in slow else []) for kind in KINDS]


@pytest.mark.parametrize("kind", partly_slow(SLOW_KINDS))
def test_kinds(kind: str):
    holds(KINDS[kind])


@pytest.mark.parametrize("kind", partly_slow(SLOW_DEFAULTS))
def test_torchs_defaults_change_nothing(kind: str):
    """A device and a dtype that are not the model's, as a script may set them; and its own as the default device."""
    call = KINDS[kind]
    plain_fails = "bad_words_ids" in call.settings  # of one token; transformers has their biases in float32 alone
    dtypes = (torch.float32, torch.float32) if plain_fails else (torch.float16, torch.float64)
    pair, inputs = models(call.model), prompts(3)
    inputs["input_ids"] %= pair[0].config.vocab_size
    expected = call(*pair, inputs, SHORT)
    with defaults(dtype=dtypes[0]):
        assert call(*pair, inputs, SHORT) == expected
    with emulated():
        moved, there = [on_device(model) for model in pair], {name: x.to("cuda:0") for name, x in inputs.items()}
    with emulated(), defaults("cuda:0", dtypes[1]):
        assert call(*moved, there, SHORT) == expected


@pytest.mark.parametrize(
    "kind", ["ragged, block", "padded, coupled", "token", "list", "masks, sampled", "seeds", "eagle3", "dspark, seeds"]
)
def test_under_deterministic_algorithms(kind: str):
    """The same text; top-p of transformers sums floats, which they refuse on CUDA in plain `generate` too."""
    call = KINDS[kind]
    pair, inputs = models(call.model), prompts(3)
    inputs["input_ids"] %= pair[0].config.vocab_size
    expected = call(*pair, inputs, SHORT)
    with emulated():
        moved, there = [on_device(model) for model in pair], {name: x.to("cuda:0") for name, x in inputs.items()}
    try:
        torch.use_deterministic_algorithms(True)
        with emulated():
            assert call(*moved, there, SHORT) == expected
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_keys_of_rows_that_end_are_kept_without_a_send(layout: str):
    settings = SAMPLED | {"eos_token_id": 7, "return_dict_in_generate": True}
    with emulated():
        moved, there = map(on_device, models("llama")), {name: x.to("cuda:0") for name, x in prompts(3).items()}
    with emulated() as device:
        Kind(options={"layout": layout}, settings=settings)(*moved, there, LONG)
    assert not [line for line in device.sends if line.startswith("models/slots")]
