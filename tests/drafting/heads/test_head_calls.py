"""Heads in queues, under grammars, with caches of the user, and with the numbers that a call asks for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from alignment import GREEDY, SAMPLED, Aligned, assert_aligned, loaded, target_of, watched
from automaton import Automaton
from head_files import TinyHead, random_head
from many import alone, assert_alone, completed, requests
from plain import assert_plain
from tiny import prompts
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedModel

from hf_specx import Drafter, DraftHead, Request, SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Round
from hf_specx.drafting.heads import head_drafter
from hf_specx.drafting.heads.head_drafter import HeadDrafter
from hf_specx.models import ragged


FORMS: dict[str, dict[str, Any]] = {  # of kinds by other producers
    "dspark by SpecForge": {"form": "early specforge dspark", "confidence": True, "layers": 2},
    "dflash by JetSpec": {"form": "z-lab", "causal": True, "parts": {"causal_head": True}, "layers": 2},
    "dflash2": {"form": "z-lab 2"},
    "domino": {"form": "early domino"},
    "eagle3 with windows": {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "window": 4},
}
PLAIN = ("eagle3", "peagle", "dspark", "medusa")
KINDS = (*PLAIN, *FORMS)
WHOLE = ("medusa", "dspark by SpecForge", "dflash by JetSpec", "dflash2")  # heads that score all tokens
CUT = {"dspark": 0.25, "dspark by SpecForge": 0.25}  # below which a head's own confidence ends a row
ENDS = {"pad_token_id": 0, "eos_token_id": [5, 6]}


def forms(*fast: str) -> list[Any]:
    """All forms, of which the others are marked as slow: they are read as a kind that is not."""
    return [pytest.param(form, marks=[] if form in fast else [pytest.mark.slow]) for form in FORMS]


def head_draft_target(kind: str, folder: Path, **more: Any) -> tuple[TinyHead, DraftHead, PreTrainedModel]:
    target = target_of()
    part = {} if kind in WHOLE else {"draft_vocab": 24}
    head = random_head(kind.split()[0], **part | {"confidence": kind == "dspark"} | FORMS.get(kind, {}) | more)
    return head, loaded(head, folder / "head", target), target


@pytest.mark.parametrize(
    ("kind", "shares_prefix"), [*((kind, False) for kind in KINDS), ("eagle3", True), ("dspark", True)]
)
def test_queues(kind: str, shares_prefix: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows come in the places of others and bring their states, also those of a shared prefix; each has
    the text of a batch of one."""
    monkeypatch.setattr(ragged, "MIN_COPIED_COLUMNS", 1)
    monkeypatch.setattr(ragged, "MIN_SAVED_TOKENS", 1)
    head, draft, target = head_draft_target(kind, tmp_path)
    strategy, cut = SpeculativeDecoding(draft, num_draft_tokens=3), 0.0 if shares_prefix else CUT.get(kind, 0.0)
    prefix = [*range(1, 10)] if shares_prefix else []
    asked = [Request([*prefix, *request.input_ids.tolist()]) for request in requests(12)]
    watch, options = watched(strategy, head, target, cut=cut), ENDS | {"assistant_confidence_threshold": cut}
    assert_alone(strategy, target, asked, batch_size=3, do_sample=False, max_new_tokens=12, **options)
    assert (strategy.report.copied > 60) == shares_prefix
    watch.check(50 if cut else 200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", *FORMS])
def test_a_long_queue(kind: str, tmp_path: Path):
    _, draft, target = head_draft_target(kind, tmp_path)
    options = {"batch_size": 16, "do_sample": False, "max_new_tokens": 6, **ENDS}
    assert_alone(SpeculativeDecoding(draft, num_draft_tokens=2), target, requests(300), **options)


@pytest.mark.parametrize("kind", ["eagle3", "dspark", *forms("dflash2", "domino")])
def test_rows_with_seeds_are_independent_of_others(kind: str, tmp_path: Path):
    head, draft, target = head_draft_target(kind, tmp_path)
    strategy, texts = SpeculativeDecoding(draft, num_draft_tokens=3), []
    cut = CUT.get(kind, 0.0)
    watch, options = watched(strategy, head, target, cut=cut), SAMPLED | ENDS | {"assistant_confidence_threshold": cut}
    for size in (1, 3):
        done = completed(strategy, target, requests(12), batch_size=size, **options)
        texts.append({index: result.tokens for index, result in done.items()})
    assert texts[0] == texts[1]
    watch.check(30 if cut else 60)


def test_a_request_with_a_seed_drafts_as_alone_after_one_without(tmp_path: Path):
    """Under "block" another number of candidates would be another text; nobody has said how many."""
    _, draft, target = head_draft_target("dflash", tmp_path, block=9)
    asked = [Request([1, 2, 3], 12), Request([4, 5], 24, seed=1), Request([7], 24, seed=2)]
    options = SAMPLED | {"eos_token_id": None}
    strategy = SpeculativeDecoding(draft, verification="block")
    done = completed(strategy, target, asked, batch_size=1, **options)
    for number in (1, 2):
        by = SpeculativeDecoding(draft, verification="block")
        assert done[number].tokens == alone(target, asked[number], by, **options)


class Int8(torch.nn.Linear):
    """Weights as quantisers keep them, made whole in each forward."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype)
        self.scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(states.to(self.scale.dtype), self.weight * self.scale)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "dflash2", "domino"])
def test_quantised_targets(kind: str, tmp_path: Path):
    """Also where the head scores by the target's own output, in another precision, and in autocast."""
    target = target_of()
    for module in list(target.modules()):
        for name, part in module.named_children():
            if isinstance(part, torch.nn.Linear):
                setattr(module, name, Int8(part))
    draft = loaded(random_head(kind, **{"markov": "rnn"} if kind == "dspark" else {}), tmp_path / "head", target)
    for settings in (GREEDY, SAMPLED):
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification="coupled")
        with torch.autocast("cpu", torch.bfloat16):
            target.generate(**prompts(3), **settings, custom_generate=strategy)
        assert_plain(target, strategy, prompts(3), **settings)
        assert strategy.report.drafted > 0
        draft.bfloat16()


@pytest.mark.parametrize("kind", [*PLAIN, *forms()])
@pytest.mark.parametrize("unread", ["hidden states of the given cache", "tokens of the given embeddings"])
def test_prompts_that_cannot_be_read(unread: str, kind: str, tmp_path: Path):
    """The head goes on with what comes after them, and the report says so."""
    head, draft, target = head_draft_target(kind, tmp_path)
    ids = torch.randint(1, 48, (3, 11), generator=torch.Generator().manual_seed(1))
    inputs, cache = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, DynamicCache()
    strategy, text = SpeculativeDecoding(draft, num_draft_tokens=3), target.generate(**inputs, **GREEDY)
    if "cache" in unread:
        with torch.no_grad():
            target(input_ids=ids[:, :7], past_key_values=cache)
        watch = watched(strategy, head, target, prefix=7)
        output = target.generate(**inputs, **GREEDY, past_key_values=cache, custom_generate=strategy)
        watch.check(50)
    else:
        embeds = target.get_input_embeddings()(ids)
        text = text[:, 11:]
        output = target.generate(inputs_embeds=embeds, **GREEDY, custom_generate=strategy)
    assert torch.equal(output, text)
    assert f"no {unread}" in strategy.report.layout_reason


@pytest.mark.filterwarnings("ignore:in this batch all rows")
@pytest.mark.parametrize(("model_type", "kind"), [("llama4_text", "medusa"), ("mamba2", "dspark")])
def test_targets_of_other_kinds(model_type: str, kind: str, tmp_path: Path):
    """Llama 4's decoder, by its name, scores tokens too; Mamba-2's cache counts none. Both have another precision."""
    target = zoo.build("causal", model_type).double()
    layers = {} if kind == "medusa" else {"layer_ids": (0, 1)}
    draft = loaded(random_head(kind, vocab=zoo.VOCAB_SIZE, **layers), tmp_path / "head", target)
    assert_plain(target, SpeculativeDecoding(draft, num_draft_tokens=3), **GREEDY)


def test_targets_with_several_states_of_a_token(tmp_path: Path):
    target = zoo.build("causal", "gemma3n_text")
    draft = loaded(random_head("eagle3", vocab=zoo.VOCAB_SIZE, layer_ids=(0, 1)), tmp_path / "head", target)
    with pytest.raises(ValueError, match="no draft head reads"):
        target.generate(**prompts(5), **GREEDY, prefill_chunk_size=4, custom_generate=SpeculativeDecoding(draft))


@pytest.mark.parametrize("layer_ids", [(1, 3), (3,), (1, 2)])
def test_targets_whose_last_layers_share_keys(layer_ids: tuple[int, ...], tmp_path: Path):
    """Gemma 4 E2B and E4B: layers 2 and 3 run for the asked logits alone, unless their states are read."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "global_head_dim": 8, "vocab_size": 48}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    sizes |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 48, "sliding_window": 6}
    torch.manual_seed(0)
    config = Gemma4TextConfig(**sizes, layer_types=2 * ["sliding_attention", "full_attention"])
    target = Gemma4ForCausalLM(config).eval()
    head = random_head("eagle3", layer_ids=layer_ids)
    draft = loaded(head, tmp_path / "head", target)
    for chunk in (None, 4):
        watch = assert_aligned(head, draft, target, prompts(3), GREEDY | {"prefill_chunk_size": chunk}, least=30)
        assert_plain(target, SpeculativeDecoding(draft, num_draft_tokens=3), prompts(3), **GREEDY)
    assert watch.compared


class Strict(Automaton):
    """Is given no token that it does not allow."""

    def accept(self, row: int, token: int) -> None:
        assert self.table[self.state(row, self.texts.get(row, []))][token]
        super().accept(row, token)


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "dflash2", "domino", "eagle3 with windows"])
def test_grammars(kind: str, tmp_path: Path):
    """Forced tokens take no step; nothing is proposed where the allowed tokens miss the head's vocabulary.

    Where they miss the few tokens that a head selects from, one of the others is.
    """
    _, draft, target = head_draft_target(kind, tmp_path, **{} if kind in WHOLE else {"draft_vocab": 6})
    vocabulary, is_draftable = set(range(48) if draft.ids is None else draft.ids.tolist()), []

    def note(done: Round) -> None:
        for index, length in enumerate(done.draft.lengths):
            for place, token in enumerate(done.draft.tokens[index, :length].tolist()):
                forced = done.draft.forced is not None and done.draft.forced[index][place]
                is_draftable.append(forced or token in vocabulary)

    def fresh() -> dict[str, Any]:
        return {"logits_processor": [Strict(48, 11)]}

    for verification in (None, "token", "coupled"):
        settings = GREEDY if verification is None else SAMPLED
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification=verification)
        strategy.listeners = (SimpleNamespace(observe=note),)
        if verification == "token":
            target.generate(**prompts(3), **settings, **fresh(), custom_generate=strategy)
        else:
            assert_plain(target, strategy, prompts(3), fresh, **settings)
    assert set(is_draftable) == {True}


def test_numbers(tmp_path: Path):
    """A block has no more candidates than places; a threshold ends rows by the head's own confidence."""
    head, draft, target = head_draft_target("dspark", tmp_path, confidence=True, block=4)
    for number in (9, "auto"):
        watch = assert_aligned(head, draft, target, prompts(3), num_draft_tokens=number)
        assert max(map(max, watch.lengths)) == 4
    strategy, cut = SpeculativeDecoding(draft, num_draft_tokens=4, verification="coupled"), CUT["dspark"]
    watch = watched(strategy, head, target, cut=cut, most=4)
    assert_plain(target, strategy, prompts(3), **SAMPLED, assistant_confidence_threshold=cut)
    watch.check()
    assert any(0 < number < 4 for lengths in watch.lengths[1:-3] for number in lengths)


class Certain(Drafter):
    """Knows the first `counts` tokens of each row, and nothing of what follows them."""

    def __init__(self, texts: list[list[int]], counts: list[int]):
        self.texts, self.counts = texts, counts

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        rows = zip(batch.rows, lengths, strict=True)
        candidates = [self.texts[row][batch.counts[row] : self.counts[row]][:length] for row, length in rows]
        tokens = pad_sequence([torch.tensor(ids, dtype=torch.int64) for ids in candidates], batch_first=True)
        return Draft(
            tokens,
            list(map(len, candidates)),
            source="certain",
            prefix_acceptance=[[1.0] * len(ids) for ids in candidates],
        )


# compiled by default are those that test_alignment.py compiles slowly
WAITING = [("eagle3", False), ("peagle", True), ("dspark", False), ("medusa", True), ("domino", True)]
BOTH = [(kind, compile) for kind in KINDS for compile in (False, True)]
SLOWLY = [pytest.param(*case, marks=pytest.mark.slow) for case in BOTH if case not in WAITING]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("kind", "compile"), [*WAITING, *SLOWLY])
def test_few_states_wait_while_another_draft_proposes(
    kind: str, compile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also of rows of unequal numbers; the head's candidates behind them are what they must be."""
    head, draft, target = head_draft_target(kind, tmp_path, **({} if kind == "medusa" else {"confidence": False}))
    monkeypatch.setattr(head_drafter, "MAX_PENDING", 6)
    waiting, observe = [], HeadDrafter.observe

    def noted(drafter: HeadDrafter, done: Round) -> None:
        observe(drafter, done)
        waiting.append(drafter.pending_states.shape[1])

    monkeypatch.setattr(HeadDrafter, "observe", noted)
    plain = target.generate(**prompts(3), **GREEDY)[:, 11:].tolist()
    drafts, watch = [Certain(plain, [17, 9, 13]), draft], Aligned(head, target)
    strategy = SpeculativeDecoding(drafts, num_draft_tokens=3, compile=compile)
    heard = lambda done: watch.observe(done) if set(done.draft.sources) <= {"head"} else None  # noqa: E731
    strategy.listeners = (SimpleNamespace(observe=heard),)
    assert_plain(target, strategy, prompts(3), **GREEDY)
    assert max(waiting) <= 6
    watch.check(10)


def test_states_wait_until_candidates_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Through rounds without candidates, of many tokens, the head misses nothing."""
    head, draft, target = head_draft_target("eagle3", tmp_path)
    monkeypatch.setattr("hf_specx.drafting.heads.head_drafter.MAX_PENDING", 6)
    changing = iter([0, 0, 0, 2, 0, 1, *[0] * 9, 3, 3, 0, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3])

    def lengths(self: Any, batch: Batch) -> list[int]:
        wanted = next(changing)
        return [min(wanted, batch.remaining_tokens(row) - 1) for row in batch.rows]

    monkeypatch.setattr("hf_specx.drafting.schedule.DraftLengthSchedule.__call__", lengths)
    assert_aligned(head, draft, target, prompts(4), SAMPLED | {"max_new_tokens": 30}, least=40)
