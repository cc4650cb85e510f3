"""Bare forwards: the replay of a call runs the forwards that hooks on the call itself saw, and times nothing else."""

import pytest
import torch
from tiny import VOCAB_SIZE, Forwards, near, tiny

from hf_specx import SpeculativeDecoding, SuffixDraft
from hf_specx.bench import bare
from hf_specx.engine.history import RoundRecord


def ids(rows, width=7):
    return torch.randint(1, VOCAB_SIZE, (rows, width), generator=torch.Generator().manual_seed(0))


def shapes(forwards):
    return [tuple(given.shape) for given in forwards.ids]


class Lengths(Forwards):
    """Also what attention sees in each forward."""

    def __init__(self, model):
        super().__init__(model)
        self.seen = []

    def _note(self, module, args, kwargs):
        super()._note(module, args, kwargs)
        past = kwargs.get("past_key_values")
        self.seen.append((0 if past is None else past.get_seq_length()) + kwargs["input_ids"].shape[1])


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("noise", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("ends", [None, [3, 7, 11, 19]])
def test_the_replay_runs_the_forwards_of_the_call(rows, noise, ends):
    target = tiny()
    draft, prompt = near(target, noise), ids(rows)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 21, "eos_token_id": ends, "pad_token_id": 0}
    torch.manual_seed(0)
    with Forwards(target) as of_target, Forwards(draft) as of_draft:
        target.generate(prompt, attention_mask=torch.ones_like(prompt), **options, custom_generate=strategy)
    with Lengths(target) as bare_target, Lengths(draft) as bare_draft:
        found = bare.replay(target, draft, prompt, strategy.report.history)
    assert shapes(bare_target) == shapes(of_target)
    assert shapes(bare_draft) == shapes(of_draft)
    assert len(found.rounds) == max(map(len, strategy.report.history)) - 1
    assert [each.length for each in found.rounds] == bare_target.seen[1:]
    if ends is None:
        assert bare_target.seen[-1] == 7 + 20 if noise == 0 else bare_target.seen[-1] <= 7 + 20


def test_attention_sees_what_the_longest_row_has():
    """The target holds all but the longest row's last token; the draft is fed what the row that misses most lacks."""
    target, draft = tiny(), tiny(seed=1)
    # round 1: row 0 keeps both candidates, row 1 none; then row 1 leaves; a plain step; a round
    history = [
        [
            RoundRecord(0, 0, 1, 0, 1),
            RoundRecord(2, 2, 3, 2, 3),
            RoundRecord(0, 0, 1, 0, 1),
            RoundRecord(2, 0, 1, 1, 1),
        ],
        [RoundRecord(0, 0, 1, 0, 1), RoundRecord(2, 0, 1, 1, 1)],
    ]
    with Lengths(target) as of_target, Lengths(draft) as of_draft:
        found = bare.replay(target, draft, ids(2), history)
    assert shapes(of_target) == [(2, 7), (2, 3), (1, 1), (1, 3)]
    assert of_target.seen == [7, 10, 11, 14]
    assert shapes(of_draft) == [(2, 7), (2, 1), (2, 1), (1, 3), (1, 1)]
    assert of_draft.seen == [7, 8, 9, 12, 13]
    assert [(each.rows, each.drafted) for each in found.rounds] == [(2, 2), (1, 0), (1, 2)]


def test_no_mask_is_given_and_few_logits_are_wanted():
    target = tiny()
    given = []
    target.register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs), with_kwargs=True)
    bare.replay(target, None, ids(2), bare.plain_history(2, 3))
    assert all("attention_mask" not in kwargs and "position_ids" not in kwargs for kwargs in given)
    assert [kwargs["logits_to_keep"] for kwargs in given] == [1, 1, 1]


def test_plain_decoding_needs_no_draft():
    target = tiny()
    with Lengths(target) as forwards:
        found = bare.replay(target, None, ids(2), bare.plain_history(2, 4))
    assert shapes(forwards) == [(2, 7), (2, 1), (2, 1), (2, 1)]
    assert forwards.seen == [7, 8, 9, 10]
    assert found.kv_bytes == (2 * 2 * 2 * 8 * 4, 0.0)  # layers, keys and values, heads, their width, float32


def test_candidates_without_a_draft_model_take_no_forwards():
    target, prompt, strategy = tiny(vocab_size=8), ids(3) % 8, SpeculativeDecoding(SuffixDraft(), num_draft_tokens=4)
    options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0}
    with Forwards(target) as of_target:
        target.generate(prompt, attention_mask=torch.ones_like(prompt), **options, custom_generate=strategy)
    assert strategy.report.accepted > 0
    with Forwards(target) as replayed:
        found = bare.replay(target, None, prompt, strategy.report.history)
    assert shapes(replayed) == shapes(of_target)
    assert all(each.draft == 0 for each in found.rounds)
    assert bare.round_bytes(target, None, found) > bare.read_bytes(target)


def test_seconds_are_those_of_forwards(monkeypatch):
    """A clock that ticks once for each token fed, and a lot where a cache is cut."""
    now = [0.0]
    monkeypatch.setattr(bare.time, "perf_counter", lambda: now[0])

    def tick(model, seconds):
        def note(module, args, kwargs):
            now[0] += seconds * kwargs["input_ids"].shape[1]

        model.register_forward_pre_hook(note, with_kwargs=True)

    cut = bare.BareModel.cut

    def slow(self, *args):
        now[0] += 1000
        cut(self, *args)

    monkeypatch.setattr(bare.BareModel, "cut", slow)
    target, draft = tiny(), tiny()
    tick(target, 1.0), tick(draft, 0.25)
    first = RoundRecord(0, 0, 1, 0, 1)
    found = bare.replay(target, draft, ids(1), [[first, RoundRecord(2, 0, 1, 1, 1), RoundRecord(2, 2, 3, 2, 3)]])
    assert found.prompt == 7 * 1.25
    assert [(each.draft, each.target) for each in found.rounds] == [(0.5, 3.0), (0.5, 3.0)]
    assert found.decoding == 7.0


def test_rounds_of_the_whole_batch_at_the_usual_number():
    found = bare.Bare(rounds=[bare.BareRound(*each, 0.0, 1.0, 9) for each in ((2, 5), (2, 5), (2, 3), (1, 5))])
    assert found.full(2) == found.rounds[:2]


def test_bytes_of_a_round():
    target, draft = tiny(), tiny(num_hidden_layers=1, tie_word_embeddings=True)
    tables = 48 * 32 * 4
    assert bare.read_bytes(target) == target.num_parameters() * 4 - tables  # untied: the table is looked up, not read
    assert bare.read_bytes(draft) == draft.num_parameters() * 4
    found = bare.Bare(rounds=[bare.BareRound(2, 3, 0.0, 0.0, 10)], kv_bytes=(8.0, 2.0))
    expected = bare.read_bytes(target) + 3 * bare.read_bytes(draft) + 20 * 8 + 3 * 20 * 2
    assert bare.round_bytes(target, draft, found) == expected


def test_bandwidth_counts_reading_and_writing(monkeypatch):
    monkeypatch.setattr(bare, "BUFFER", 400)
    ticks = iter([0.0, 1.0, 10.0, 10.5] + [20.0, 24.0] * 4)
    monkeypatch.setattr(bare.time, "perf_counter", lambda: next(ticks))
    assert bare.bandwidth(torch.device("cpu")) == 2 * 400 / 0.5
