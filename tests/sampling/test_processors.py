"""Processors see what stock would show them, at every position of every row."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from all_pairs import once
from head_files import random_head, write
from plain import assert_plain, coupled
from processor_settings import SETTINGS, SYNTHID
from tiny import near, prompts, tiny
from transformers.generation import logits_process as host
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.logits_process import LogitsProcessor

from hf_specx import DraftHead, SpeculativeDecoding
from hf_specx.common.batch import Batch, RowState
from hf_specx.sampling.per_request import RequestProcessors


@pytest.mark.parametrize(("name", "do_sample", "rows"), once(SETTINGS, [False, True], [4, 1, 8]))
def test_equals_stock(name: str, do_sample: bool, rows: int, tmp_path: Path):
    """Also with a head, which scores a part of the vocabulary."""
    target = tiny()
    settings = {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 24, "pad_token_id": 0} | SETTINGS[name]
    for noise in (0.05, 2.0):
        compared = assert_plain(target, coupled(target, noise), prompts(rows), **settings)
        assert noise > 1 or compared.forwards < compared.plain
    head = DraftHead.from_pretrained(write(random_head(layer_ids=(0, 1), draft_vocab=24), tmp_path), target=target)
    strategy = SpeculativeDecoding(head, num_draft_tokens=3, verification="coupled")
    assert_plain(target, strategy, prompts(rows), **settings)


def test_what_a_row_limits_ends_with_the_row():
    """In a queue: the row that takes back least, and that has masks, has left; the other may draft as it likes."""
    few = SimpleNamespace(max_rollback=2, limited_by="a grammar", mask_size=5)
    many = SimpleNamespace(max_rollback=9, limited_by="another", mask_size=0)
    row_states = [RowState(processors=few), RowState(processors=many)]
    batch = Batch(torch.ones(2, 3, dtype=torch.int64), None, 0, row_states=row_states)
    processors = RequestProcessors(batch, frozenset(), (20, "the target"))
    assert (processors.max_rollback, processors.limited_by, processors.mask_size) == (2, "a grammar", 5)
    batch.drop_rows([0])
    assert (processors.max_rollback, processors.limited_by, processors.mask_size) == (9, "another", 0)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_strict_constraint_is_asked_only_what_stock_may_ask(rows: int, do_sample: bool):
    """A trie knows nothing of texts behind an end, nor of other rows' texts; it raises for what it does not know."""
    lengths = [3, 5, 4, 2]

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        written = ids[11:].tolist()
        assert all(t % 5 == row for t in written), "the text of another row"
        assert len(written) <= lengths[row], "behind the end"
        return [row, row + 5] if len(written) == lengths[row] else [t for t in range(10, 48) if t % 5 == row]

    def tolerant(row: int, ids: torch.Tensor) -> list[int]:
        return [47] if (ids[11:] < 10).any() else allowed(row, ids)  # stock asks on for finished rows

    target = tiny()
    settings = {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 12, "eos_token_id": list(range(10))}
    settings |= {"pad_token_id": 47}
    for noise in (0.0, 0.05, 2.0):
        asked = iter([tolerant, allowed])  # stock is the first
        fresh = lambda asked=asked: {"prefix_allowed_tokens_fn": next(asked)}  # noqa: E731
        assert_plain(target, coupled(target, noise), prompts(rows), fresh, **settings)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_prefix_function_is_asked_for_prompts(do_sample: bool):
    """From transformers 5.24 on it gets the number of the prompt, whatever `num_return_sequences` is."""
    settings = {
        "do_sample": do_sample,
        "top_k": 0,
        "max_new_tokens": 20,
        "num_return_sequences": 2 if do_sample else 1,
    }
    settings["prefix_allowed_tokens_fn"] = lambda prompt, ids: range(4 * prompt, 4 * prompt + 20)
    strategy = coupled(tiny(), 0.05)
    compared = assert_plain(tiny(), strategy, **settings)
    assert strategy.report.layout == "ragged"
    assert strategy.report.accepted > 0
    assert compared.forwards < compared.plain


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("settings", [{"temperature": 0.5, "top_k": 10}, {"watermarking_config": SYNTHID}], ids=str)
def test_processors_act_once_on_the_draft(settings: dict, verification: str):
    """With the draft equal to the target everything is accepted; twice the temperature, or a mark, would not be."""
    target = tiny()
    strategy = SpeculativeDecoding(target, num_draft_tokens=4, verification=verification)
    settings = {"do_sample": True, "max_new_tokens": 30} | settings
    target.generate(**prompts(4), **settings, custom_generate=strategy)
    assert strategy.report.alpha > 1 - 1e-4
    assert strategy.report.acceptance_rate > 1 - 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_scores_of_another_precision_are_kept(dtype: torch.dtype):
    """With ids that have none as bfloat16, one of which ends a text."""

    class Precise(LogitsProcessor):
        stateless = True

        def __call__(self, input_ids, scores):
            return scores.to(dtype)

    target = tiny(vocab_size=1000)
    processors = [Precise(), host.RepetitionPenaltyLogitsProcessor(1.3), host.NoRepeatNGramLogitsProcessor(2)]
    settings = {"do_sample": True, "top_k": 8, "max_new_tokens": 16, "logits_processor": processors}
    free = assert_plain(target, coupled(target, 0.05), prompts(3), **settings).text
    end = next(token for token in free[0, -12:].tolist() if token > 256 and token % 4)
    assert (assert_plain(target, coupled(target, 0.05), prompts(3), **settings, eos_token_id=end).text == end).any()


def prefix_of(texts: torch.Tensor, tolerant: bool):
    """Allows what follows in one of the texts; behind any other prefix nothing, or an error."""
    next_tokens = {(row, tuple(t[:n])): [t[n]] for row, t in enumerate(texts.tolist()) for n in range(11, len(t))}

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        prefix = row, tuple(ids.tolist())
        return next_tokens.get(prefix, []) if tolerant else next_tokens[prefix]

    return allowed


@pytest.mark.parametrize("tolerant", [False, True])
def test_texts_that_are_allowed_nothing_may_be_candidates(tolerant: bool):
    """A row that does not get there is not concerned, also if it is as long with another text later."""
    target = tiny()
    settings = {"do_sample": False, "max_new_tokens": 24}
    settings["prefix_allowed_tokens_fn"] = prefix_of(target.generate(**prompts(4), **settings), tolerant)
    lookup = PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=1, max_length=200)
    for draft in (near(target, 0.3), lookup):
        assert_plain(target, SpeculativeDecoding(draft, num_draft_tokens=4), **settings)


def test_a_text_that_is_allowed_nothing_is_an_error_as_in_stock():
    target, settings = tiny(), {"do_sample": False, "max_new_tokens": 9}
    settings["prefix_allowed_tokens_fn"] = lambda row, ids: [] if len(ids) == 14 and row == 1 else [5, 6]
    with pytest.raises(ValueError, match="empty list"):
        target.generate(**prompts(2), **settings)
    with pytest.raises(ValueError, match="row 1 after 3"):
        target.generate(**prompts(2), **settings, custom_generate=coupled(target, 0.0))
