"""What a draft with another tokenizer reads of a text, and what it is trained on there."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from other_tokens import PROMPTS, draft_of, target_of, tokenizer_of, vocabularies_of
from tiny import tiny
from torch.nn.parallel import DistributedDataParallel

from hf_specx import SpeculativeDecoding
from hf_specx.training.distributions import losses_of, overlap
from hf_specx.training.losses import LOSSES
from hf_specx.training.reading import Reader, collate, last_logits, own_tokens
from hf_specx.training.recipe import TrainingRecipe
from hf_specx.training.texts import Text


KIND = "byte-level"
OTHERS = {"byte-level, other merges": 0, "unigram": 10, "byte fallback": 0}  # positions that are read anew, at least
NEW = 40
CPU = torch.device("cpu")


class Seen:
    """What candidates of one row were drawn from, by how many tokens the row had."""

    def __init__(self):
        self.probs: dict[int, torch.Tensor] = {}

    def observe(self, done):
        if done.draft.probs is not None:
            self.probs[done.before[0]] = done.draft.probs[0, 0].float()


@cache
def generated(kind: str) -> list[tuple[Text, Seen]]:
    """Texts of a target with what a draft of another kind proposed from on the way."""
    target, found = target_of(KIND), []
    tokenizers = {"tokenizer": tokenizer_of(KIND), "draft_tokenizer": tokenizer_of(kind)}
    for number, prompt in enumerate(PROMPTS):
        strategy = SpeculativeDecoding(
            draft_of(KIND, kind), num_draft_tokens=1, tokenizer_match="tokens", **tokenizers
        )
        strategy.listeners = (seen := Seen(),)
        ids = tokenizer_of(KIND)(prompt, return_tensors="pt").input_ids
        torch.manual_seed(number)
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "eos_token_id": None}
        text = target.generate(ids, **options, custom_generate=strategy)[0].tolist()
        found.append((Text(text[: ids.shape[1]], text[ids.shape[1] :]), seen))
    return found


@pytest.mark.parametrize("kind", OTHERS)
def test_logits_are_those_that_candidates_are_drawn_from(kind: str):
    """Also where the bytes since the last boundary are written in the draft's tokens, and anew when more follow."""
    reader, anew = Reader(vocabularies_of(KIND, kind)), 0
    made = generated(kind)
    batch = reader.collate([text for text, _ in made], everywhere=True)
    with torch.no_grad():
        logits = reader.draft_logits(draft_of(KIND, kind), CPU, batch, rows=3).split(NEW)
    for (text, seen), own in zip(made, logits, strict=True):
        _, asked = own_tokens(text, reader.vocabularies, everywhere=True)
        for number, probs in seen.probs.items():
            torch.testing.assert_close(own[number].softmax(-1), probs, atol=1e-5, rtol=1e-3)
            anew += asked[number][0] > 0
        assert len(seen.probs) > NEW // 3
    assert anew >= OTHERS[kind]


def test_training_asks_where_one_row_has_what_is_read():
    """In one row of the draft's tokens for each text, with the same logits as everywhere; other labels are -100."""
    reader, draft = Reader(vocabularies_of(KIND, "unigram")), draft_of(KIND, "unigram")
    texts = [text for text, _ in generated("unigram")]
    batch, everywhere = reader.collate(texts), reader.collate(texts, everywhere=True)
    kept, asked = (each["labels"][each["labels"] != -100] for each in (batch, everywhere))
    assert asked.tolist() == [token for text in texts for token in text.new]
    assert 0 < len(kept) < len(asked)
    assert len(batch["draft_input_ids"]) == len(texts) < len(everywhere["draft_input_ids"])
    with torch.no_grad():
        some, every = reader.draft_logits(draft, CPU, batch), reader.draft_logits(draft, CPU, everywhere, rows=5)
    torch.testing.assert_close(some, every[(batch["labels"] != -100)[everywhere["labels"] != -100]])
    assert every.shape == (len(asked), len(tokenizer_of(KIND)))


def test_learning_from_prompts_asks_for_all_but_the_first_token():
    """Of either tokenizer, and in training alone."""
    reader = Reader(learn_from_prompts=True)
    texts = [Text([5, 6], [7, 8, 9]), Text([1, 2, 3, 4], [5])]
    assert reader.collate(texts)["labels"].tolist() == [[-100, 6, 7, 8, 9], [-100, 2, 3, 4, 5]]
    assert reader.collate(texts, everywhere=True)["labels"].tolist() == collate(texts)["labels"].tolist()
    other, texts = vocabularies_of(KIND, "unigram"), [text for text, _ in generated("unigram")]
    asked = [int((Reader(other, said).collate(texts)["labels"] != -100).sum()) for said in (False, True)]
    assert asked[0] < asked[1] < sum(len(text.prompt) + len(text.new) - 1 for text in texts)


@pytest.fixture
def one_process():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_the_head_is_asked_only_where_there_is_something_to_learn():
    """Also inside what the Trainer puts around a draft where there are several processes."""
    model, widths = tiny(), []
    model.lm_head.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    batch = collate([Text([1, 2, 3, 4, 5, 6], [7, 8])])
    plain, _ = last_logits(model, CPU, batch)
    around, _ = last_logits(DistributedDataParallel(model), CPU, batch)
    assert torch.equal(around, plain)
    assert widths == [3, 3]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_least_where_the_draft_has_the_targets_distribution_among_common_tokens(loss: str):
    """And with the gradient zero there, though the target gives other tokens a part that the draft cannot have."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(6, 12, generator=generator, dtype=torch.float64)
    common, recipe = torch.tensor([0, 2, 3, 7, 11]), TrainingRecipe(loss=loss, temperature=0.7)
    best = torch.full_like(target, -torch.inf)
    best[:, common] = target[:, common]
    best.requires_grad_()
    least = losses_of(recipe, target, best, common)
    least.sum().backward()
    assert best.grad.isfinite().all()
    if loss not in ("total_variation", "log_acceptance", "lk"):  # these have a kink there
        torch.testing.assert_close(best.grad, torch.zeros_like(best.grad), atol=1e-9, rtol=0)
    torch.testing.assert_close(least, torch.zeros_like(least), atol=1e-9, rtol=0)
    moved = best.detach() + 0.3 * torch.randn(target.shape, generator=generator, dtype=torch.float64)
    assert (losses_of(recipe, target, moved, common) > least).all()
    possible = (target / 0.7).softmax(-1)[:, common].sum(-1)
    torch.testing.assert_close(overlap(recipe, target, best.detach()), possible)


def test_the_loss_counts_as_much_as_the_target_has_on_common_tokens():
    target = torch.tensor([[0.0, 0.0, 20.0], [0.0, 0.0, -20.0]])
    draft = torch.tensor([[1.0, 0.0, -torch.inf]]).expand(2, 3)
    rare, common = losses_of(TrainingRecipe(), target, draft, torch.tensor([0, 1]))
    assert rare < 1e-6 < common
