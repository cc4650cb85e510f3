"""The target's own multi-token layers propose what transformers' `use_mtp` proposes, row by row at any batch size."""

import copy
import itertools
import pickle
from pathlib import Path

import pytest
import torch
from many import assert_alone
from mtp_models import RECURRENT, TYPES, VOCAB_SIZE, mtp_target
from plain import assert_plain
from rounds import Heard
from tiny import tiny
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

import hf_specx
from hf_specx import Costs, MtpDraft, Request, SpeculativeDecoding, SuffixDraft
from hf_specx.drafting.heads import head_drafter
from hf_specx.drafting.heads.mtp import MtpDrafter, read_layers
from hf_specx.drafting.schedule import DraftLengthSchedule


NEW = 24
GENERATOR = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(1, VOCAB_SIZE - 1, (1, length), generator=GENERATOR) for length in (9, 4, 1, 6)]
KNOWN_BY_NUMBER = ("deepseek_v3", "glm4_moe")  # whose class names the layers of real checkpoints


@pytest.fixture(scope="module", params=TYPES)
def target(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        named = request.param.startswith(KNOWN_BY_NUMBER)
        yield mtp_target(request.param, tmp_path_factory.mktemp("target"), patch if named else None)


def ours(target, inputs, rows: int):
    """The text; what each row was proposed, by the number of tokens that it had; and the report."""
    strategy = SpeculativeDecoding(MtpDraft(), num_draft_tokens=layers_of(target))
    drafted_by_row = [{} for _ in range(rows)]
    strategy.listeners = (rounds := Heard(lambda done: (done.rows, done.emitted_before, done.draft)),)
    out = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, custom_generate=strategy)
    for numbers, counts, draft in rounds:
        for row, before, length, tokens in zip(numbers, counts, draft.lengths, draft.tokens.tolist(), strict=True):
            drafted_by_row[row] |= {before: tokens[:length]} if length else {}
    return out, drafted_by_row, strategy.report


def layers_of(target) -> int:
    return getattr(target.config.get_text_config(), "num_mtp_layers", 1)


def left_padded() -> dict[str, torch.Tensor]:
    ids = torch.cat([torch.nn.functional.pad(prompt, (9 - prompt.shape[1], 0)) for prompt in PROMPTS])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_candidates_and_text_are_those_of_transformers(target, monkeypatch):
    get_candidates, theirs = MTPCandidateGenerator.get_candidates, {}
    prompt = PROMPTS[0]

    def noted(self, input_ids, *args, **kwargs):
        ids, logits = get_candidates(self, input_ids, *args, **kwargs)
        if ids.shape[1] > input_ids.shape[1]:
            theirs[input_ids.shape[1] - prompt.shape[1]] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    wanted = target.generate(prompt, max_new_tokens=NEW, do_sample=False, use_mtp=True)
    out, (drafted,), report = ours(target, {"inputs": prompt}, 1)
    assert torch.equal(out, wanted)
    assert 0 < report.accepted < report.drafted
    shared = theirs.keys() & drafted.keys()
    assert len(shared) >= len(theirs) - 2  # near the limit transformers proposes more than can be emitted
    for before in shared:
        assert drafted[before] == theirs[before][: len(drafted[before])]


def test_each_row_of_a_batch_is_that_of_its_own_run(target):
    inputs = left_padded()
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    out, drafted_by_row, _ = ours(target, inputs, len(PROMPTS))
    assert torch.equal(out, plain)
    for row, prompt in enumerate(PROMPTS):
        alone, (single,), _ = ours(target, {"inputs": prompt}, 1)
        if not torch.equal(out[row, -NEW:], alone[0, -NEW:]):
            assert target.config.model_type == "inkling_text"  # whose own text depends on pads
            continue
        shared = single.keys() & drafted_by_row[row].keys()
        assert shared
        for before in shared:
            count = min(len(single[before]), len(drafted_by_row[row][before]))
            assert drafted_by_row[row][before][:count] == single[before][:count]


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
def test_trees(target):
    """Next best choices beside each candidate: of one layer, as most targets have, that is the whole tree."""
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        strategy = SpeculativeDecoding(MtpDraft(), num_draft_tokens=layers_of(target), tree=8, verification="coupled")
        assert_plain(target, strategy, left_padded(), **sampling, max_new_tokens=NEW, pad_token_id=0)
        report = strategy.report
        assert bool(report.tree_reason) == (report.nodes == report.drafted)


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize("name", RECURRENT)
def test_targets_with_recurrent_states(tmp_path: Path, name: str):
    """Each candidate is that of transformers' layer over the whole text, which it does not load for these itself."""
    target, inputs = mtp_target(name, tmp_path), left_padded()
    layers, plain = read_layers(target), target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    out, drafted_by_row, report = ours(target, inputs, len(PROMPTS))
    assert torch.equal(out, plain)
    assert 0 < report.accepted < report.drafted
    for row, prompt in enumerate(PROMPTS):
        assert drafted_by_row[row]
        for before, drafted in drafted_by_row[row].items():
            text = out[row : row + 1, 9 - prompt.shape[1] : 9 + before]
            with torch.no_grad():
                states = target(text[:, :-1], output_hidden_states=True).hidden_states[-1]
                positions = torch.arange(1, text.shape[1])[None]
                assert layers(text[:, 1:], states, None, positions, None)[0].tolist() == [drafted]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside n-grams"])
def test_auto_considers_what_the_layers_can_draft(
    beside: bool, tmp_path: Path, draft_pays: None, monkeypatch: pytest.MonkeyPatch
):
    """A layer for each candidate: a larger number would be cut, and "auto" would judge by what never comes."""
    target = mtp_target("deepseek_v3 of three", tmp_path, monkeypatch)
    propose, asked = MtpDrafter.propose, []
    monkeypatch.setattr(
        MtpDrafter, "propose", lambda self, batch, lengths: asked.extend(lengths) or propose(self, batch, lengths)
    )
    drafts = [SuffixDraft(), MtpDraft()] if beside else MtpDraft()
    strategy = SpeculativeDecoding(drafts, costs=Costs(alpha={"greedy": 0.95}))  # by which many candidates pay
    assert_plain(target, strategy, left_padded(), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert set(asked) <= {0, 1, 2, 3}
    assert 3 in asked


def test_layers_are_read_once_a_model(tmp_path: Path, monkeypatch):
    target, read, reads = mtp_target("mellum", tmp_path), MtpModel.from_pretrained, []
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *args, **kwargs: reads.append(1) or read(*args, **kwargs))
    inputs = left_padded()
    wanted = target.generate(**inputs, max_new_tokens=8, do_sample=False)
    for _ in range(2):
        out = hf_specx.generate(**inputs, model=target, max_new_tokens=8, do_sample=False, use_mtp=True)
        assert torch.equal(out, wanted)
    assert len(reads) == 1
    hf_specx.generate(**inputs, model=target.bfloat16(), max_new_tokens=8, do_sample=False, use_mtp=True)
    assert len(reads) == 2  # for a target of another precision


@pytest.mark.parametrize(("name", "layers"), [("mellum", 1), ("deepseek_v3 of three", 3)])
def test_states_that_wait_are_taken_up_in_pieces(tmp_path: Path, monkeypatch, name: str, layers: int):
    """Through rounds without candidates; those behind them are the same as if all had waited."""
    target, drafted = mtp_target(name, tmp_path, monkeypatch if name.startswith(KNOWN_BY_NUMBER) else None), []
    for most in (1, 10**6):
        monkeypatch.setattr(head_drafter, "MAX_PENDING", most)
        changing = itertools.chain([0] * 9 + [layers, 0, 0, 0], itertools.repeat(layers))
        monkeypatch.setattr(
            DraftLengthSchedule, "__call__", lambda self, batch, to=changing: [next(to)] * len(batch.rows)
        )
        strategy, rounds = (
            SpeculativeDecoding(MtpDraft(), num_draft_tokens=layers),
            Heard(lambda done: done.draft.tokens),
        )
        strategy.listeners = (rounds,)
        target.generate(**left_padded(), max_new_tokens=NEW, do_sample=False, custom_generate=strategy)
        drafted.append([tokens.tolist() for tokens in rounds])
    assert drafted[0] == drafted[1]
    assert sum(len(tokens[0]) for tokens in drafted[0]) > 6


def test_a_pickle_reads_the_layers_anew(tmp_path: Path):
    target, inputs, strategy = mtp_target("mellum", tmp_path), left_padded(), SpeculativeDecoding(MtpDraft())
    settings = {**inputs, "max_new_tokens": 8, "do_sample": False}
    for copied in (strategy, pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)):
        assert torch.equal(target.generate(**settings, custom_generate=copied), target.generate(**settings))
        assert copied.report.drafted > 0
    assert len(pickle.dumps(strategy)) < 20_000  # without the layers


@pytest.mark.parametrize("name", ["mellum", "deepseek_v3 of three"])
def test_sampled_texts_and_queues(tmp_path: Path, monkeypatch, name):
    """The very tokens of plain sampling, and a queue whose rows are filled again, in which each row is its own."""
    target = mtp_target(name, tmp_path, monkeypatch if name.startswith(KNOWN_BY_NUMBER) else None)
    strategy = SpeculativeDecoding(MtpDraft(), num_draft_tokens=layers_of(target), verification="coupled")
    assert_plain(target, strategy, left_padded(), max_new_tokens=NEW, do_sample=True, top_k=0)
    assert strategy.report.accepted > 0
    requests = [Request(prompt[0]) for prompt in PROMPTS * 2]
    assert_alone(strategy, target, requests, batch_size=3, max_new_tokens=9, do_sample=False)
    assert strategy.report.accepted > 0


def refused(target, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        target.generate(PROMPTS[0], max_new_tokens=4, custom_generate=SpeculativeDecoding(MtpDraft()))


def test_targets_whose_layers_are_not_there_are_refused(tmp_path: Path, monkeypatch):
    """They have none, transformers is too old to run them, or the files lack them."""
    refused(tiny(), r"LlamaForCausalLM has no multi-token layers.*give a draft model")
    target = mtp_target("mellum", tmp_path)
    with monkeypatch.context() as patch:
        patch.delattr(MtpModel, "forward_layer")
        refused(target, r"cannot be read from .*: transformers is older than 5\.20")
    target.save_pretrained(tmp_path / "without")
    again = type(target).from_pretrained(tmp_path / "without").eval()
    refused(again, r"cannot be read from .*without.*missing")
