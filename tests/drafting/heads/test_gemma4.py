"""Assistants of Gemma 4 propose what they must over the target's own keys, in rows of unequal length, without loss."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from alignment import GREEDY, SAMPLED, Aligned, NodesAligned
from all_pairs import each_value
from automaton import Automaton
from enumerated import ENOUGH, exact_distribution, first_tokens, p_values
from gemma4_models import KINDS, ORDERED, VOCAB_SIZE, assistant_logits, assistant_of, gemma4_target, targets_read
from many import assert_alone, requests
from plain import assert_plain
from tiny import tiny
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Stock
from transformers.generation.logits_process import TemperatureLogitsWarper

import hf_specx
from hf_specx import DraftTargetPair, SpeculativeDecoding, SuffixDraft
from hf_specx.models import ragged
from hf_specx.models.slots import CACHE
from hf_specx.sampling.verifiers import RejectionVerifier, distribution


LENGTHS = (11, 4, 1, 7, 9, 2, 3, 8)  # of prompts: below and above the window
WRONG: dict[str, dict[str, int]] = {
    "the key of the next token is seen": {"keys": 1},
    "a key is missing": {"keys": -1},
    "a position later": {"position": 1},
    "a position earlier": {"position": -1},
    "a wider window": {"window": 1},
    "a narrower window": {"window": -1},
}
PENALTIES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5}


def left_padded(rows: int, vocab: int = VOCAB_SIZE) -> dict[str, torch.Tensor]:
    lengths = torch.tensor(LENGTHS[:rows])[:, None]
    mask = (torch.arange(max(LENGTHS)) >= max(LENGTHS) - lengths).long()
    ids = torch.randint(1, vocab, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask}


class Beside(Aligned):
    """Each candidate, and the law that it was drawn from, beside the plain computation over the row's whole text."""

    def __init__(self, assistant: PreTrainedModel, target: PreTrainedModel, **variant: int):
        super().__init__(assistant, target)  # type: ignore[arg-type]
        self.variant = variant

    def states(self, texts: dict[int, list[int]]) -> list[Any]:
        return targets_read(self.target, list(texts.values()))

    def logits(self, text: Sequence[int], states: Any, drafted: Sequence[int]) -> list[torch.Tensor]:
        return assistant_logits(self.head, self.target, states, text, drafted, **self.variant)


def pair(kind: str = "12B", vocab: int = VOCAB_SIZE, changes: dict[str, Any] | None = None, **of_assistant: Any):
    """A target with some changes, and an assistant for it."""
    sizes = {"vocab_size": vocab} | ({"vocab_size_per_layer_input": vocab} if kind == "E2B" else {})
    target = gemma4_target(kind, **sizes | (changes or {}))
    return target, assistant_of(target, **of_assistant)


def watched(strategy: SpeculativeDecoding, *models: PreTrainedModel, **variant: int) -> Beside:
    watch = Beside(models[1], models[0], **variant)
    strategy.listeners = (watch,)
    return watch


LAYOUTS = ("ragged", "packed", "padded", "lockstep")
IN_LAYOUTS = [("E2B", layout) for layout in LAYOUTS] + [("12B", "ragged"), ("31B", "ragged")]
IN_SLOW_LAYOUTS = [
    pytest.param(kind, layout, marks=pytest.mark.slow) for kind in ("12B", "31B") for layout in LAYOUTS[1:]
]


@pytest.mark.parametrize(("kind", "layout"), [*IN_LAYOUTS, *IN_SLOW_LAYOUTS])
def test_candidates_of_ragged_rows(kind: str, layout: str):
    """Greedy and sampled, through windows and rollbacks; in lockstep windows lack a key, as in transformers' cache."""
    target, assistant = pair(kind)
    variant = {"window": -1} if layout == "lockstep" else {}
    for settings in (GREEDY, SAMPLED):
        strategy = SpeculativeDecoding(assistant, num_draft_tokens=3, verification="coupled", layout=layout)
        watch = watched(strategy, target, assistant, **variant)
        assert_plain(target, strategy, left_padded(3), **settings)
        watch.check(50)
        assert strategy.report.accepted > 0


@pytest.mark.parametrize(
    "changes", [{"unified": True}, ORDERED, {"attn": "eager"}], ids=["unified", "clusters", "eager"]
)
def test_other_assistants(changes: dict[str, Any]):
    """The unified one, one whose head knows the likeliest clusters of tokens alone, and one under eager attention."""
    changes = dict(changes)
    attention = changes.pop("attn", "sdpa")
    target, assistant = pair(**changes)
    assistant.set_attn_implementation(attention)
    for settings in (GREEDY, SAMPLED):
        strategy = SpeculativeDecoding(assistant, num_draft_tokens=3, verification="block")
        watch = watched(strategy, target, assistant)
        target.generate(**left_padded(3), **settings, custom_generate=strategy)
        watch.check(50)


def test_a_target_under_eager_attention():
    target, assistant = pair("E2B")
    target.set_attn_implementation("eager")
    strategy = SpeculativeDecoding(assistant, num_draft_tokens=3, verification="coupled")
    watch = watched(strategy, target, assistant)
    assert_plain(target, strategy, left_padded(3), **SAMPLED)
    watch.check(50)


class EachNode(NodesAligned, Beside):
    """Each node of greedy trees beside the plain computation."""


@pytest.mark.parametrize(("kind", "changes"), [(kind, {}) for kind in KINDS] + [("12B", ORDERED)])
def test_trees(kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    target, assistant = pair(kind, **changes)
    strategy = SpeculativeDecoding(assistant, num_draft_tokens=3, tree=12)
    assert_plain(target, strategy, left_padded(3), **SAMPLED)
    assert strategy.report.nodes > strategy.report.drafted
    watch = EachNode(assistant, target, monkeypatch)  # type: ignore[arg-type]
    strategy.listeners = (*strategy.listeners, watch)
    assert_plain(target, strategy, left_padded(3), **GREEDY)
    watch.check(100)


SHARED = ("the key of the next token is seen", "a position earlier")  # of a target that shares keys
SEEN = [("12B", variant) for variant in WRONG] + [("E2B", variant) for variant in SHARED]
SEEN_SLOWLY = [pytest.param("E2B", variant, marks=pytest.mark.slow) for variant in WRONG if variant not in SHARED]


@pytest.mark.parametrize(("kind", "variant"), [*SEEN, *SEEN_SLOWLY])
def test_wrong_variants_are_rejected(kind: str, variant: str):
    target, assistant = pair(kind)
    strategy = SpeculativeDecoding(assistant, num_draft_tokens=3, verification="block")
    watch = watched(strategy, target, assistant, **WRONG[variant])
    target.generate(**left_padded(3), **SAMPLED, custom_generate=strategy)
    assert len(watch.wrong) > watch.compared / 2 > 25


@pytest.mark.parametrize("kind", KINDS)
def test_the_computation_is_that_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch):
    """In its first round, where no key is stale: one position later, and with a window that is one wider."""
    (target, assistant), seen, get_candidates = pair(kind), [], Stock.get_candidates

    def noted(self: Stock, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = get_candidates(self, input_ids, *args, **kwargs)
        seen.append((input_ids[0].tolist(), ids[0, input_ids.shape[1] :].tolist(), logits))
        return ids, logits

    monkeypatch.setattr(Stock, "get_candidates", noted)
    assistant.generation_config.num_assistant_tokens = 4
    target.generate(left_padded(1)["input_ids"], **GREEDY, assistant_model=assistant)
    text, drafted, logits = next(proposal for proposal in seen if proposal[1])
    assert len(drafted) == 4
    (read,) = targets_read(target, [text])
    for place, expected in enumerate(assistant_logits(assistant, target, read, text, drafted, position=1, window=1)):
        assert torch.allclose(logits[0, place].double(), expected, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_stock_with_the_assistant(kind: str):
    target, assistant = pair(kind)
    ids, assistant.generation_config.num_assistant_tokens = left_padded(1)["input_ids"], 5
    expected = target.generate(ids, **GREEDY, assistant_model=assistant)
    strategy = SpeculativeDecoding(assistant, num_draft_tokens=5)
    assert torch.equal(target.generate(ids, **GREEDY, custom_generate=strategy), expected)
    assert torch.equal(hf_specx.generate(ids, model=target, assistant_model=assistant, **GREEDY), expected)
    assert strategy.report.accepted > 0


@pytest.mark.parametrize(("rows", "settings"), each_value([1, 3, 8], [GREEDY, SAMPLED, SAMPLED | PENALTIES]))
def test_texts_are_those_of_plain_generate(rows: int, settings: dict[str, Any]):
    (target, assistant), call, compared = pair(), settings | {"max_new_tokens": 30}, None
    for number in ("auto", 4):
        strategy = SpeculativeDecoding(assistant, num_draft_tokens=number, verification="coupled")
        compared = assert_plain(target, strategy, left_padded(rows), before=compared, **call)
    assert compared.forwards < compared.plain or settings is GREEDY
    assert strategy.report.accepted > 0


@pytest.mark.parametrize(("kind", "shares_prefix"), [("12B", False), ("E2B", False), ("12B", True), ("E2B", True)])
def test_queues(kind: str, shares_prefix: bool, monkeypatch: pytest.MonkeyPatch):
    """Rows come in the places of others, with keys that are read or copied; each has the text of a batch of one."""
    monkeypatch.setattr(ragged, "MIN_COPIED_COLUMNS", 1)
    monkeypatch.setattr(ragged, "MIN_SAVED_TOKENS", 1)
    changes = {"sliding_window": 64} if shares_prefix else {}  # a window that has lost keys gives none away
    target, assistant = pair(kind, 48, changes)
    strategy, prefix = SpeculativeDecoding(assistant, num_draft_tokens=3), [*range(1, 10)] if shares_prefix else []
    asked = [hf_specx.Request([*prefix, *request.input_ids.tolist()]) for request in requests(12)]
    watch = watched(strategy, target, assistant)
    options = {"eos_token_id": [5, 6], "pad_token_id": 0, "do_sample": False, "max_new_tokens": 12}
    assert_alone(strategy, target, asked, batch_size=3, **options)
    assert (strategy.report.copied > 60) == shares_prefix
    watch.check(50)


@pytest.mark.slow
def test_a_long_queue():
    target, assistant = pair("E2B", vocab=48)
    options = {"eos_token_id": [5, 6], "pad_token_id": 0, "do_sample": False, "max_new_tokens": 6}
    assert_alone(SpeculativeDecoding(assistant, num_draft_tokens=2), target, requests(300), batch_size=16, **options)


def test_sampled_rows_with_seeds_are_independent_of_others():
    target, assistant = pair("E2B", vocab=48)
    texts = []
    for size in (1, 3):
        strategy = SpeculativeDecoding(assistant, num_draft_tokens=3)
        watch = watched(strategy, target, assistant)
        done = strategy.generate_many(target, requests(12), batch_size=size, **SAMPLED)
        texts.append({row.index: row.tokens for row in done})
        watch.check(50)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("assistant", [{}, ORDERED], ids=["whole", "clusters"])
def test_grammars(assistant: dict[str, Any]):
    """Forced tokens take no candidates; where no likely cluster has an allowed token, any allowed one is drawn."""
    target, draft = pair(vocab=48, **assistant)

    def fresh() -> dict[str, Any]:
        return {"logits_processor": [Automaton(48, 11)]}

    for verification in ("greedy", "token", "coupled"):
        settings = GREEDY if verification == "greedy" else SAMPLED | {"temperature": 0.3}
        strategy = SpeculativeDecoding(draft, num_draft_tokens=3)
        strategy.verification = None if verification == "greedy" else verification
        if verification == "token":
            target.generate(**left_padded(3, 48), **settings, **fresh(), custom_generate=strategy)
        else:
            assert_plain(target, strategy, left_padded(3, 48), fresh, **settings)
        assert strategy.report.accepted > 0


@pytest.mark.filterwarnings("ignore:compile=True compiles")
@pytest.mark.parametrize("kind", ["E2B", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("31B", "12B"))])
def test_compiled_targets(kind: str, traced: None):
    """Buffers with idle rows, and rings of a fixed length."""
    target, assistant = pair(kind)
    strategy = SpeculativeDecoding(assistant, num_draft_tokens=3, verification="coupled", compile=True)
    watch = watched(strategy, target, assistant)
    assert_plain(target, strategy, left_padded(3), **SAMPLED | {"max_new_tokens": 60})
    watch.check(50)


def test_a_cache_that_is_given():
    """All of its keys are seen."""
    target, assistant = pair()
    ids, cache = torch.randint(1, VOCAB_SIZE, (3, 11), generator=torch.Generator().manual_seed(1)), DynamicCache()
    with torch.no_grad():
        target(input_ids=ids[:, :7], **{CACHE: cache})
    strategy = SpeculativeDecoding(assistant, num_draft_tokens=3)
    watch = watched(strategy, target, assistant)
    text = target.generate(ids, **GREEDY, **{CACHE: cache}, custom_generate=strategy)
    assert torch.equal(text, target.generate(ids, **GREEDY))
    watch.check(50)
    assert "no hidden states" not in strategy.report.layout_reason


def test_beside_suffixes():
    target, assistant = pair("E2B")
    strategy = SpeculativeDecoding([SuffixDraft(min_match=1), assistant], num_draft_tokens=3, verification="coupled")
    assert_plain(target, strategy, left_padded(3), **SAMPLED)
    assert strategy.report.accepted > 0


def test_names_and_pairs(tmp_path: Path):
    """An assistant by its folder, and as the draft of a pair that is saved and loaded."""
    target, assistant = pair("E2B")
    assistant.save_pretrained(tmp_path / "assistant")
    inputs = left_padded(3)
    expected = target.generate(**inputs, **GREEDY)
    strategy = SpeculativeDecoding(str(tmp_path / "assistant"), num_draft_tokens=3)
    watch = watched(strategy, target, assistant)
    assert torch.equal(target.generate(**inputs, **GREEDY, custom_generate=strategy), expected)
    watch.check(50)
    DraftTargetPair(target, assistant).save_pretrained(tmp_path / "pair")
    again = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert torch.equal(again.generate(**inputs, **GREEDY, num_draft_tokens=3), expected)
    assert again.report.accepted == strategy.report.accepted > 0


def of_five(**changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = gemma4_target("E2B", vocab_size=5, vocab_size_per_layer_input=5)
    return target, assistant_of(target, **changes)


LAW = [("token", "clusters")]
OTHERS = [case for case in product(["token", "block"], ["clusters", "whole"]) if case not in LAW]
LAW += [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS]
FALSE_ALARM = 1e-4 / (2 * len(LAW))  # of one p-value; over all choices of seeds some test fails with 1e-4
COOL = {"temperature": 0.7}


def drawn(verification: str, name: str) -> tuple[float, float]:
    clusters = {"use_ordered_embeddings": True, "num_centroids": 5, "centroid_intermediate_top_k": 3}
    target, assistant = of_five(**clusters if name == "clusters" else {})
    strategy = SpeculativeDecoding(assistant, num_draft_tokens=3, verification=verification)
    tokens = first_tokens(strategy, **ENOUGH, target=target, **COOL)
    assert strategy.report.accepted > 0
    return p_values(tokens, exact_distribution([TemperatureLogitsWarper(0.7)], target=target))


@pytest.mark.parametrize(("verification", "name"), LAW)
def test_law(verification: str, name: str):
    """Of the first tokens by enumeration, behind a processor."""
    assert min(drawn(verification, name)) > FALSE_ALARM


def test_candidates_that_are_not_drawn_from_their_q_are_seen(monkeypatch: pytest.MonkeyPatch):
    """As stock: the likeliest token is proposed, and judged as if it were drawn."""

    def likeliest(self: RejectionVerifier, batch: Any, scores: torch.Tensor, *args: Any) -> Any:
        return scores.argmax(-1), distribution(scores)[0]

    monkeypatch.setattr(RejectionVerifier, "draw_candidates", likeliest)
    assert min(drawn("token", "whole")) < 1e-8


def refused(message: str, target: PreTrainedModel, assistant: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=message):
        target.generate(torch.tensor([[1, 2]]), max_new_tokens=4, custom_generate=SpeculativeDecoding(assistant))


def test_what_does_not_fit_is_refused_by_name():
    target, assistant = pair()
    refused("LlamaForCausalLM", tiny(), assistant)
    for name, value in {"hidden_size": 48, "vocab_size": 9, "sliding_window": 6, "head_dim": 4}.items():
        refused(name, gemma4_target(**{name: value}), assistant)
    refused("num_key_value_heads", gemma4_target("31B"), assistant)
    whole = {"layer_types": ["full_attention"] * 2}
    refused("sliding_attention", gemma4_target(**whole), assistant)
    refused("training mode", target, assistant_of(target).train())
    other = assistant_of(target)
    other.config.get_text_config()._attn_implementation = "flash_attention_2"
    refused("flash_attention_2", target, other)
