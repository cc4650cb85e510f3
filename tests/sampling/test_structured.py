"""Structured output by the libraries that users have: the very text of plain `generate`, with candidates and masks."""

import copy
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from defaults import defaults
from grammar_cases import (
    CALL_BEGIN,
    CALL_END,
    CASES,
    LIBRARIES,
    SCHEMAS,
    TAGS,
    THINK_END,
    able,
    installed,
    make,
    make_tags,
    pair,
    valid,
    vocabulary,
)
from plain import assert_plain
from rounds import Heard
from tiny import Forwards, tiny

from hf_specx import GrammarAfter, SpeculativeDecoding, ThinkingBudget, sampling
from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.sampling.grammars import OutlinesGuides


TEXTS = ["The answer as JSON: ", "Tom wrote", "Here is what the machine said, in short: ", "{}", "Once upon a time"]
TEXTS += ["a b", "Colours", "My name is"]
NEW = 40


def need(library: str) -> None:
    """Skip the test where what it takes is not installed."""
    if not installed(library) or (library == "prefix function" and not installed("outlines")):
        pytest.skip(f"{library} is not installed")


def inputs_of(rows: int) -> dict[str, torch.Tensor]:
    tokenizer = copy.copy(pair().tokenizer)
    tokenizer.padding_side = "left"
    return dict(tokenizer(TEXTS[:rows], return_tensors="pt", padding=True))


def check(library: str, case: str, rows: int, sampled: bool, suffix: bool = False) -> None:
    """Text and generator are those of plain `generate` with a fresh processor, in fewer forwards; ended texts fit."""
    need(library)
    target, inputs = pair().target, inputs_of(rows)
    width, processors = inputs["input_ids"].shape[1], [make(library, case, inputs["input_ids"].shape[1]) for _ in "ab"]
    options = {"max_new_tokens": NEW, "do_sample": sampled} | ({"top_k": 0} if sampled else {})
    draft, verification = SuffixDraft() if suffix else pair().draft, "coupled" if sampled else None
    strategy, unused = SpeculativeDecoding(draft, num_draft_tokens=4, verification=verification), iter(processors)
    with Forwards(target) as forwards:
        compared = assert_plain(target, strategy, inputs, lambda: {"logits_processor": [next(unused)]}, **options)
    assert strategy.report.layout == "ragged"
    texts = compared.text[:, width:].tolist()
    emitted = sum(new.index(0) + 1 if 0 in new else len(new) for new in texts)
    fed = sum(len(ids) for ids in forwards.ids) - rows * compared.plain  # a row that is done is fed no more
    assert fed < emitted or emitted <= 4 * rows  # there may be nothing to save
    for new in texts:
        if 0 in new:
            assert valid(case, pair().tokenizer.decode(new[: new.index(0)]))
    if library != "prefix function":  # what the user made was not used up
        torch.manual_seed(1)
        again = target.generate(**inputs, **options, logits_processor=[processors[1]])
        assert torch.equal(again, compared.text)


def grammars() -> Iterator:
    """Every library, grammar, number of rows and mode; few of them in the default run."""
    pairs = [(library, case) for library in LIBRARIES for case in CASES if able(library, case)]
    for number, (library, case) in enumerate(pairs):
        for rows, sampled in product([1, 4, 8], [False, True]):
            few = number % 9 == 0 and (rows, sampled) in ((1, False), (4, True))
            yield pytest.param(library, case, rows, sampled, marks=() if few else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore:Error in LLMatcher")
@pytest.mark.parametrize(("library", "case", "rows", "sampled"), grammars())
def test_text_is_that_of_plain_generate(library: str, case: str, rows: int, sampled: bool):
    check(library, case, rows, sampled)


@pytest.mark.filterwarnings("ignore:Error in LLMatcher")
@pytest.mark.parametrize("library", LIBRARIES)
def test_masks_are_on_the_cpu_whatever_torchs_default_device(library: str):
    """Their addresses are handed to native code, which writes there."""
    need(library)
    target, inputs = pair().target, inputs_of(2)
    width, options = inputs["input_ids"].shape[1], {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(**inputs, **options, logits_processor=[make(library, "flat", width)])
    processor, strategy = make(library, "flat", width), SpeculativeDecoding(pair().draft, num_draft_tokens=3)
    with defaults():
        text = target.generate(**inputs, **options, logits_processor=[processor], custom_generate=strategy)
    assert torch.equal(text, plain)
    assert strategy.report.accepted > 0


def test_an_error_of_a_guide_is_not_taken_for_another_vocabulary(monkeypatch: pytest.MonkeyPatch):
    need("outlines")

    def fail(matchers: OutlinesGuides, matcher: object, row: int) -> None:
        raise ValueError("the state is unknown")

    monkeypatch.setattr(OutlinesGuides, "write_mask", fail)
    strategy = SpeculativeDecoding(pair().draft)
    with pytest.raises(ValueError, match="the state is unknown"):
        pair().target.generate(**inputs_of(1), logits_processor=[make("outlines", "flat")], custom_generate=strategy)


@pytest.mark.parametrize("library", ["xgrammar", "outlines"])
@pytest.mark.parametrize("sampled", [False, True])
def test_forced_tokens_alone_make_it_faster(library: str, sampled: bool):
    check(library, "constants", 1, sampled, suffix=True)


CODE = ["import os\nimport sys\n", "Once upon a time", "import torch\nimport"]
STRUCTURAL = [*product(["xgrammar"], TAGS), ("outlines llguidance", "calls")]
FEW_LIBRARIES = ["xgrammar", *(pytest.param(name, marks=pytest.mark.slow) for name in [*LIBRARIES][1:-1])]
OFTEN = {("xgrammar", "calls", False, 3), ("xgrammar", TAGS[-1], True, 3)}


def within() -> Iterator:
    """Each kind of tags, mode and number of rows; few of them in the default run."""
    for (library, case), sampled, rows in product(STRUCTURAL, [False, True], [1, 3]):
        marks = () if (library, case, sampled, rows) in OFTEN else pytest.mark.slow
        yield pytest.param(library, case, sampled, rows, marks=marks)


@pytest.mark.filterwarnings("ignore:Error in LLMatcher")
@pytest.mark.parametrize(("library", "case", "sampled", "rows"), [*within()])
def test_tags_within_a_text(library: str, case: str, sampled: bool, rows: int):
    """The text of plain `generate`, free outside of the tags and of the grammar inside, with candidates in both."""
    need(library)
    target, tokenizer = pair().target, copy.copy(pair().tokenizer)
    tokenizer.padding_side = "left"
    inputs = dict(tokenizer(CODE[:rows], return_tensors="pt", padding=True))
    width, strategy = inputs["input_ids"].shape[1], SpeculativeDecoding(pair().draft, num_draft_tokens=4)
    if sampled:
        strategy = SpeculativeDecoding(pair().draft, num_draft_tokens=4, verification="coupled")
    options = {"max_new_tokens": 32, "do_sample": sampled} | ({"temperature": 0.5} if sampled else {})
    fresh = lambda: {"logits_processor": [make_tags(library, case)]}  # noqa: E731
    compared = assert_plain(target, strategy, inputs, fresh, **options)
    assert compared.forwards < compared.plain
    if case != "after thinking":  # which a model that was not taught it never ends
        begin, end = (CALL_BEGIN, CALL_END) if case == "calls" else (THINK_END, "<|end|>")
        _, begun, after = tokenizer.decode(compared.text[0, width:]).partition(begin)
        content, ended, _ = after.partition(end)
        assert begun
        assert strategy.report.forced > 0
        assert valid("constants", content) if ended else content.lstrip().startswith("{")


@pytest.mark.filterwarnings("ignore:Error in LLMatcher")
@pytest.mark.parametrize(("rows", "sampled"), [(1, True), (3, False)])
@pytest.mark.parametrize(
    "library", ["xgrammar", *(pytest.param(name, marks=pytest.mark.slow) for name in [*LIBRARIES][1:-1])]
)
def test_a_grammar_after_thinking(library: str, rows: int, sampled: bool):
    """After the thinking that a budget ends, the text is what the library's own processor makes of it as a prompt."""
    need(library)
    target, inputs, tokenizer = pair().target, inputs_of(rows), pair().tokenizer
    width, num_thought = inputs["input_ids"].shape[1], 5
    budget = ThinkingBudget(num_thought, tokenizer=tokenizer)
    num_before = num_thought + len(budget.end)
    strategy = SpeculativeDecoding(pair().draft, num_draft_tokens=4, verification="coupled" if sampled else None)
    processors = [budget, GrammarAfter(make(library, "constants"), THINK_END, tokenizer=tokenizer)]
    fresh = lambda: {"logits_processor": processors}  # noqa: E731
    options = {"max_new_tokens": num_before + 30, "do_sample": sampled}
    compared = assert_plain(target, strategy, inputs, fresh, **options)
    assert compared.forwards < compared.plain
    assert strategy.report.forced > len(budget.end)
    assert compared.text[:, width + num_thought : width + num_before].tolist() == [[*budget.end]] * rows
    if not sampled:
        inputs["input_ids"] = compared.text[:, : width + num_before]
        inputs["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, num_before), value=1)
        options |= {"max_new_tokens": 30, "logits_processor": [make(library, "constants")]}
        assert torch.equal(target.generate(**inputs, **options), compared.text)


class Half(Drafter):
    """Sure of what comes, of which every other token is one that no grammar allows."""

    def __init__(self, text: torch.Tensor):
        self.text = text  # [L]

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        number = min(lengths[0], 2)
        start = len(batch.row(0))
        tokens = self.text[None, start : start + number].clone()
        tokens[:, 1:] = 300
        return Draft(tokens, [tokens.shape[1]], None, "half", prefix_acceptance=[[1.0] * tokens.shape[1]])


@pytest.mark.filterwarnings("ignore:Error in LLMatcher")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_mixture_proposes_nothing_that_a_grammar_excludes(library: str):
    need(library)
    target, rounds, inputs = pair().target, Heard(lambda done: done), inputs_of(1)
    width, options = inputs["input_ids"].shape[1], {**inputs, "max_new_tokens": 16, "do_sample": False}
    plain = target.generate(**options, logits_processor=[make(library, "constants", width)])
    strategy = SpeculativeDecoding([Half(plain[0]), pair().draft], num_draft_tokens=2)
    strategy.listeners = (rounds,)
    text = target.generate(**options, logits_processor=[make(library, "constants", width)], custom_generate=strategy)
    assert text.tolist() == plain.tolist()
    numbers = [(done.draft.lengths, done.accepted) for done in rounds if done.draft.sources == ["half"]]
    assert len(numbers) > 4
    assert all(pair == ([1], [1]) for pair in numbers)


def test_each_row_may_have_a_grammar_of_its_own():
    xgrammar = pytest.importorskip("xgrammar")
    grammars = [make("xgrammar", case).compiled_grammars[0] for case in ("flat", "words", "endless", "array")]
    inputs, target = inputs_of(4), pair().target
    options, strategy = {"max_new_tokens": NEW, "do_sample": False}, SpeculativeDecoding(pair().draft)
    make_new = lambda: {"logits_processor": [xgrammar.contrib.hf.LogitsProcessor(grammars)]}  # noqa: E731
    assert_plain(target, strategy, inputs, make_new, **options)
    with pytest.raises(ValueError, match="3 rows"):
        target.generate(**inputs_of(3), **options, **make_new(), custom_generate=strategy)


@pytest.mark.parametrize("library", ["xgrammar", "outlines", "outlines llguidance"])
def test_a_processor_in_the_middle_of_a_text_is_refused(library: str):
    need(library)
    processor, target = make(library, "flat"), pair().target
    target.generate(**inputs_of(1), max_new_tokens=3, do_sample=False, logits_processor=[processor])
    strategy = SpeculativeDecoding(pair().draft)
    with Forwards(target) as forwards, pytest.raises(ValueError, match="was used before"):
        target.generate(**inputs_of(1), max_new_tokens=3, logits_processor=[processor], custom_generate=strategy)
    assert not forwards.ids


@pytest.mark.parametrize(("library", "size"), [("xgrammar", 9000), *((library, 300) for library in [*LIBRARIES][:-1])])
def test_a_grammar_of_another_vocabulary_is_refused(library: str, size: int):
    need(library)
    assert size != vocabulary()
    target = tiny(vocab_size=size)
    ids = torch.tensor([[5, 6, 7]])
    strategy = SpeculativeDecoding(tiny(vocab_size=size, seed=1))
    with Forwards(target) as forwards, pytest.raises(ValueError, match=f"tokens and the target has {size}"):
        target.generate(ids, max_new_tokens=3, logits_processor=[make(library, "flat")], custom_generate=strategy)
    assert not forwards.ids


# what each needs, and whether a model that was not taught the tags comes to a forced token
OF_BLOCKS = [("xgrammar", True), ("outlines", True), ("lmformatenforcer", True)]
OF_BLOCKS += [("hf_specx", False), ("xgrammar", True), ("xgrammar", False)]
BLOCKS = re.findall(r"```python\n(.*?)```", (Path(sampling.__file__).parent / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize(("needs", "block"), [*zip(OF_BLOCKS, BLOCKS, strict=True)])
def test_lines_of_the_readme(monkeypatch: pytest.MonkeyPatch, needs: tuple[str, bool], block: str):
    library, is_forced = needs
    pytest.importorskip(library)
    monkeypatch.setattr(transformers.tokenization_utils, "PreTrainedTokenizerBase", None, raising=False)
    target, inputs, schema = pair().target, inputs_of(2), SCHEMAS["constants"]
    names = {"tokenizer": pair().tokenizer, "model": target, "inputs": inputs, "schema": schema, "texts": []}
    called = block.replace("model.generate(", "texts.append(model.generate(").replace("=strategy)", "=strategy))")
    plain, strategy = {**names, "strategy": None}, SpeculativeDecoding(pair().draft)
    exec(called, plain)
    exec(called, {**names, "strategy": strategy})
    assert names["texts"][0].tolist() == names["texts"][1].tolist()
    assert strategy.report.layout == "ragged"
    assert not is_forced or strategy.report.forced > 0
