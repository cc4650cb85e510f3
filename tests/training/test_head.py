"""Heads that are trained: what they learn from is what they propose, from nothing or from a head that was given."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from head_files import random_head, write
from head_reference import head_logits, target_states
from tiny import tiny
from training_cases import report_of, same, some_prompts, trained, weights
from zoo import build

from hf_specx import DraftHead, DraftTargetPair, SpeculativeDecoding
from hf_specx.common.drafts import NEW_HEADS
from hf_specx.drafting.heads.dflash2 import NOT_SELECTED
from hf_specx.training.draft import Learner
from hf_specx.training.head import DRAFT_EVERY, HeadDraft, new_head
from hf_specx.training.losses import Predicted
from hf_specx.training.recipe import TrainingRecipe
from hf_specx.training.target_outputs import TargetOutputCache, TargetOutputs, Text


WINDOW = {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "window": 6}
FORMS = {
    "eagle3": {},
    "eagle3 for a part of the vocabulary": {"draft_vocab": 20},
    "eagle3 of layers, with norms of queries and keys": {"layers": 2, "qk_norm": True, "norms": "each"},
    "eagle3 whose normed states go on": {"norm_output": True, "norm_before_residual": True, "norms": "one"},
    "eagle3, narrow": {"width": 16, "own_embeddings": True, "own_head": True},
    "dspark": {"draft_vocab": 20},
    "dspark gated": {"markov": "gated"},
    "dspark rnn, narrow": {"markov": "rnn", "width": 16, "confidence": True, "block": 4},
    "dspark with a window": WINDOW,
    "dflash with a window of blocks": WINDOW | {"window_non_causal": True},
    "dflash2": {"layers": 2, "multiplier": 1.5, "softcap": 2.0, "embedding_scale": 0.5},
}
KINDS = ("eagle3", "dspark", "dflash2")
TEXTS = [Text([3, 9, 27], [1, 8, 5, 40, 7, 2]), Text([5], [6, 7, 30]), Text([4, 4], [9])]


def learner_of(draft: DraftHead, target, **options) -> Learner:
    return HeadDraft(target, draft, TrainingRecipe(**options), (None, None))


def outputs_of(learner: Learner, texts: list[Text]) -> TargetOutputs:
    return TargetOutputCache(learner.target, learner.hidden_state_taps, 4, 0).outputs(texts)


def predicted(learner: Learner, draw: int | None = None) -> tuple[dict[tuple[int, int], torch.Tensor], Predicted]:
    """The logits of a head for the texts, by row and step, and all of its predictions.

    Those of tokens that a selector has not selected are -inf.
    """
    draws = None if draw is None else [draw] * len(TEXTS)
    with torch.no_grad():
        predictions = learner.predict(learner.trained, TEXTS, outputs_of(learner, TEXTS), draws)
    rows_steps = zip(predictions.rows.tolist(), predictions.steps.tolist(), strict=True)
    logits = predictions.logits
    logits = logits.masked_fill(logits < -NOT_SELECTED / 2, -torch.inf)
    if predictions.selected is not None:
        chosen, scores = predictions.selected.ids, predictions.selected.logits
        logits = torch.full_like(logits, -torch.inf).scatter(1, chosen, scores)
    return dict(zip(rows_steps, logits, strict=True)), predictions


@pytest.mark.parametrize("form", FORMS)
def test_it_learns_from_the_drafts_that_it_would_make(form: str, tmp_path: Path):
    """Each prediction beside the reference: the law of the candidate of a draft that began so many tokens before.

    None begins inside a prompt.
    """
    target = tiny(num_hidden_layers=8, initializer_range=0.2)
    head = random_head(form.split()[0].strip(","), **FORMS[form])
    draft = DraftHead.from_pretrained(write(head, tmp_path), target=target)
    logits_by_step, predictions = predicted(learner_of(draft, target, num_draft_tokens=3))
    new_tokens = [(text, index) for text in TEXTS for index in range(len(text.new))]
    for (row, step), logits in logits_by_step.items():
        text, index = new_tokens[row]
        ids, end = text.prompt + text.new, len(text.prompt) + index
        before, drafted = ids[: end - step], ids[end - step : end]
        states = [state[0] for state in target_states(target, head.layer_ids, torch.tensor([before[:-1]]))]
        output = target.get_output_embeddings().weight
        expected = head_logits(head, target.get_input_embeddings().weight, output, before, states, drafted)
        expected = expected if predictions.ids is None else expected[predictions.ids]
        torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=1e-3)
    ends = [(len(text.prompt) + index, max(2, len(text.prompt))) for text, index in new_tokens]
    assert logits_by_step.keys() == {
        (row, step) for row, (end, least) in enumerate(ends) for step in range(3) if end - step >= least
    }


@pytest.mark.parametrize("kind", KINDS)
def test_each_draft_is_learned_in_one_of_so_many_steps(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the number that is drawn for a text; however many drafts there are at once."""
    target = tiny(num_hidden_layers=8, initializer_range=0.2)
    form = random_head(kind, **({"markov": "rnn", "confidence": True} if kind == "dspark" else {}))
    head = DraftHead.from_pretrained(write(form, tmp_path), target=target)
    learner = learner_of(head, target, num_draft_tokens=3)
    trained = dict(learner.trained.draft_head.named_parameters())
    assert not any(weight.requires_grad for name, weight in trained.items() if "confidence" in name)
    whole, predictions = predicted(learner)
    monkeypatch.setattr("hf_specx.training.unrolled_drafts.DRAFTS_AT_ONCE", 2)
    parts = [predicted(learner, draw) for draw in range(DRAFT_EVERY, 2 * DRAFT_EVERY)]
    assert sum(len(part) for part, _ in parts) == len(whole)
    assert {part.share for _, part in parts} == {DRAFT_EVERY * predictions.share}
    for part in (predicted(learner)[0], *(part for part, _ in parts)):
        for row_step, logits in part.items():
            torch.testing.assert_close(logits, whole[row_step], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", NEW_HEADS)
def test_short_texts_behind_which_no_draft_begins(kind: str):
    """There is nothing to learn in such a step."""
    target = tiny(num_hidden_layers=8, initializer_range=0.2)
    learner = learner_of(new_head(target, kind, torch.ones(48), TrainingRecipe()), target, num_draft_tokens=3)
    outputs = outputs_of(learner, TEXTS[2:])
    numbers = [len(learner.predict(learner.trained, TEXTS[2:], outputs, [draw]).rows) for draw in range(DRAFT_EVERY)]
    assert numbers == [1, *[0] * (DRAFT_EVERY - 1)]
    learner.predict(learner.trained, TEXTS[2:], outputs, [1]).logits.sum().backward()
    assert not any(weight.grad.any() for weight in learner.trained.parameters() if weight.grad is not None)


def test_a_new_head_for_a_part_of_the_vocabulary():
    """The most frequent ids; its output starts as the target's rows of these; it is the same again under a seed.

    The mask of a block is a rare id that the target's embeddings tell from others, which those of pads may not.
    """
    target = tiny(initializer_range=0.2)
    target.get_input_embeddings().weight.data[[0, 1, 2]] = 0
    recipe, texts = TrainingRecipe(draft_vocab_size=3), ([[7, 7, 9]], [Text([7, 7, 9], [9, 30, 30, 5])])
    learners = [HeadDraft(target, kind, recipe, (None, None)) for kind in ("eagle3", "dspark", "dspark")]
    for learner in learners:
        learner.prepare(*texts)
        head = learner.initial
        assert head.ids.tolist() == head.t2d.nonzero().flatten().tolist() == [7, 9, 30]
        assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight[[7, 9, 30]])
    assert same(weights(head), weights(learners[1].initial))
    assert head.config.mask_token_id not in (0, 1, 2, 7, 9, 30, 5)
    assert not same(weights(head), weights(new_head(target, "dspark", torch.ones(48), replace(recipe, seed=1))))


@pytest.mark.parametrize(("kind", "loss"), [("eagle3", "jsd"), ("dspark", "total_variation")])
def test_a_head_from_nothing(kind: str, loss: str, tmp_path: Path):
    """Accepted more than at the start, with more tokens a round; saved and loaded it is the same.

    What is reported is what generating gives: tokens a round, over some 1,500 rounds whose standard deviation is
    below 1.2; they differ by more than 0.15 less than once in 1e5, but for rounds that are cut at the end of a text.
    """
    held_out, options = some_prompts(80, seed=1), {"texts_per_phase": 32, "passes": 4, "max_new_tokens": 32}
    result = trained(draft=kind, loss=loss, held_out=held_out, num_draft_tokens=3, **options)
    assert result.gain.low > 0.05
    assert result.tokens_after.low > result.tokens_before.high
    result.pair.save_pretrained(tmp_path / "pair")
    pair = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert (pair.draft.config.kind, pair.draft.config.num_draft_tokens) == (kind, 3)
    assert same(weights(pair.draft), weights(result.pair.draft))
    report = report_of(replace(result, pair=pair), held_out[1::2] * 2, 3)
    assert report.mean_acceptance_length == pytest.approx(result.tokens_after.value, abs=0.15)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_was_given_is_trained_further(kind: str, tmp_path: Path):
    """It is left as it was; so is the target."""
    target, head = tiny(initializer_range=0.2), kind
    if kind == "dflash2":  # a random one
        folder = write(random_head(kind, layer_ids=(0, 1), top_k=12), tmp_path)
        head = DraftHead.from_pretrained(folder, target=target)
    else:
        start = trained(target=target, draft=kind, phases=1)
        head = start.pair.draft
    before = weights(target), weights(head)
    result = trained(target=target, draft=head, phases=3 if kind == "dflash2" else 1)  # of a random one
    assert kind == "dflash2" or result.before.value == pytest.approx(start.after.value, abs=1e-6)
    assert result.gain.low > 0
    assert same(weights(target), before[0])
    assert same(weights(head), before[1])
    assert all(weight.requires_grad and weight.grad is None for weight in target.parameters())


def test_long_texts_are_cut(monkeypatch):
    """Of a text of any length so many tokens are learned from; those before them are read by the target alone."""
    monkeypatch.setattr("hf_specx.training.head.MAX_LEARNED_TOKENS", 4)
    target = tiny(initializer_range=0.2)
    learner = learner_of(new_head(target, "eagle3", torch.ones(48), TrainingRecipe()), target, num_draft_tokens=2)
    (text,) = texts = [Text([1, 2, 3], list(range(4, 30))).cut(learner.max_learned_tokens)]
    assert text == (list(range(1, 26)), [26, 27, 28, 29])
    outputs, shapes = outputs_of(learner, texts), []
    learner.trained.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    predictions = learner.predict(learner.trained, texts, outputs)
    assert shapes == [(1, 4)]
    assert outputs.logits.shape == (4, 48)
    assert (predictions.rows.tolist(), predictions.steps.tolist()) == ([0, 1, 2, 3, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1])


def test_a_target_in_bfloat16_with_an_output_of_its_own():
    """Its head has the target's precision, is trained in float32, and scores a part of the vocabulary."""
    target = tiny("phi", initializer_range=0.2).to(torch.bfloat16)
    result = trained(target=target, draft="eagle3", phases=2, draft_vocab_size=20, max_new_tokens=8)
    assert result.gain.low > 0
    assert result.pair.draft.dtype == torch.bfloat16
    assert len(result.pair.draft.ids) == 20
    strategy = SpeculativeDecoding(result.pair.draft, num_draft_tokens=2)
    assert target.generate(torch.tensor([[3, 4]]), max_new_tokens=8, custom_generate=strategy).shape == (1, 10)


def test_a_target_whose_layers_differ_in_size():
    """The new head has sizes of its own where the target's config has one for each layer."""
    target, call = build("causal", "gemma4_text"), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    head = new_head(target, "dspark", torch.ones(target.config.vocab_size), TrainingRecipe())
    strategy, ids = SpeculativeDecoding(head, num_draft_tokens=2), torch.tensor([[3, 4, 5]])
    assert torch.equal(target.generate(ids, **call, custom_generate=strategy), target.generate(ids, **call))
    assert strategy.report.drafted > 0


def test_a_head_without_an_output_of_its_own(tmp_path: Path):
    """It scores as the target does, with its bias, as when it drafts; these weights of the target are not trained."""
    target = tiny("phi", num_hidden_layers=8, initializer_range=0.2)
    target.lm_head.bias.data.normal_()
    head = DraftHead.from_pretrained(write(random_head("eagle3", own_head=False), tmp_path), target=target)
    module = learner_of(head, target).trained
    states = torch.randn(2, 32)
    torch.testing.assert_close(module.drafter.compute_logits(states), target.lm_head(states))
    assert len(list(module.parameters())) == len(list(head.parameters()))


def test_a_head_of_another_kind_is_refused(tmp_path: Path):
    target = tiny(num_hidden_layers=8)
    head = DraftHead.from_pretrained(write(random_head("peagle"), tmp_path), target=target)
    with pytest.raises(ValueError, match="peagle"):
        trained(target=target, draft=head)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "draft_vocab_size"), [("eagle3", 280), ("eagle3", 100), ("dspark", 280), ("dspark", 100)]
)
def test_the_speculators_library_reads_a_new_head(kind: str, draft_vocab_size: int, tmp_path: Path):
    """`pip install speculators`: tensor by tensor; what is not in the files it takes from the target, which it names.

    The name of one in a folder of this machine is not in the files.
    """
    speculators = pytest.importorskip("speculators")
    target = tiny(num_hidden_layers=8, vocab_size=280)
    target.save_pretrained(tmp_path / "target")
    target.name_or_path = str(tmp_path / "target")
    head = new_head(target, kind, torch.ones(280), TrainingRecipe(draft_vocab_size=draft_vocab_size))
    head.save_pretrained(tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "target"
    config["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "target")
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    speculator = speculators.SpeculatorModel.from_pretrained(tmp_path / "head")
    saved, read = (
        {name.removeprefix("network."): tensor for name, tensor in weights(model).items()}
        for model in (head, speculator)
    )
    assert read.keys() - saved.keys() == {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert all(torch.equal(tensor, read[name]) for name, tensor in saved.items())
    assert getattr(speculator.config, f"{'eagle_' * (kind == 'eagle3')}aux_hidden_state_layer_ids") == [4, 6, 7]
