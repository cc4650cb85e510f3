"""Whether the tokens of a draft mean what the target's mean, where not both tokenizers were given."""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from all_pairs import each_value
from tiny import VOCAB_SIZE, prompts, tiny
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from hf_specx import SpeculativeDecoding


WORDS = [f"w{number}" for number in range(VOCAB_SIZE)]
OTHERS = WORDS[::-1]
APART = "and whether these are the same tokens is not known, since"


def tokenizer_of(words: Sequence[str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)})))


def loaded(folder: Path, words: Sequence[str] | None = None, seed: int = 0) -> PreTrainedModel:
    """A model loaded from a folder, in which its tokenizer may lie too."""
    tiny(seed=seed).save_pretrained(folder)
    if words is not None:
        tokenizer_of(words).save_pretrained(folder)
    return type(tiny()).from_pretrained(folder).eval()


def warned(target: PreTrainedModel, draft: PreTrainedModel, **options) -> list[str]:
    """What a call warns of."""
    strategy = SpeculativeDecoding(draft, num_draft_tokens=2, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        target.generate(**prompts(2, width=6), max_new_tokens=3, do_sample=False, custom_generate=strategy)
    return [str(each.message) for each in caught if APART in str(each.message)]


def test_files_of_one_tokenizer(tmp_path: Path):
    """Then types and special ids, which would be warned of, do not count."""
    target, draft = loaded(tmp_path / "target", WORDS), loaded(tmp_path / "draft", WORDS, seed=1)
    draft.generation_config.eos_token_id, target.generation_config.eos_token_id = 5, 7
    assert warned(target, draft) == []
    (tmp_path / "draft" / "tokenizer.json").unlink()
    assert len(warned(target, copy.deepcopy(draft))) == 1


@pytest.mark.parametrize(
    "tokenizers", [{}, {"tokenizer": tokenizer_of(WORDS)}, {"draft_tokenizer": tokenizer_of(OTHERS)}]
)
def test_files_of_other_tokenizers(tokenizers: dict, tmp_path: Path):
    """One tokenizer may be given, the other is the one beside the model."""
    target, draft = loaded(tmp_path / "target", WORDS), loaded(tmp_path / "draft", OTHERS, seed=1)
    for _ in range(2):  # not once, as a warning
        with pytest.raises(ValueError, match="48 of 48 ids"):
            warned(target, draft, **tokenizers)


def test_nothing_to_compare():
    """Once for each two models; not where types and special ids agree, nor where a tokenizer is said to be of both."""
    target, of_other_type, of_other_end = tiny(eos_token_id=5), tiny("gpt2"), tiny(seed=1, eos_token_id=7)
    (message,) = warned(target, of_other_type)
    assert f"{APART} the target is of type llama and the draft of type gpt2" in message
    assert "pass tokenizer= and draft_tokenizer=" in message
    assert warned(target, of_other_type) == []
    (message,) = warned(target, of_other_end, tokenizer=tokenizer_of(WORDS))
    assert "since the target's texts end at id 5, and the draft's end at id 7" in message
    assert warned(target, tiny(seed=2, eos_token_id=5)) == []
    assert warned(target, tiny(seed=3, eos_token_id=[7, 5])) == []
    tokenizer = tokenizer_of(WORDS)
    assert warned(target, tiny("gpt2", seed=1), tokenizer=tokenizer, draft_tokenizer=tokenizer) == []


SIZES = {"a larger draft": (VOCAB_SIZE, VOCAB_SIZE + 8), "a smaller draft": (VOCAB_SIZE + 8, VOCAB_SIZE)}


def padded(folder: Path, size: int, words: Sequence[str], seed: int = 0) -> PreTrainedModel:
    """A model loaded from a folder, with its tokenizer and more scores than that has tokens."""
    tiny(vocab_size=size, seed=seed, hidden_size=32).save_pretrained(folder)
    tokenizer_of(words).save_pretrained(folder)
    return type(tiny()).from_pretrained(folder).eval()


@pytest.mark.parametrize(("sizes", "verification"), each_value(SIZES, ["token", "block", "coupled"]))
def test_one_tokenizer_and_padded_vocabularies_of_other_sizes(sizes: str, verification: str, tmp_path: Path):
    """As of Qwen 2.5. Ids that the draft alone scores are never proposed, those that it lacks may be emitted."""
    size, draft_size = SIZES[sizes]
    target = padded(tmp_path / "target", size, WORDS)
    draft = padded(tmp_path / "draft", draft_size, WORDS)
    with torch.no_grad():  # the same model, but for the ids that only one of them scores
        common = min(size, draft_size)
        for name, weight in draft.state_dict().items():
            of_target = target.state_dict()[name]
            weight[:common].copy_(of_target[:common]) if "embed" in name or "lm_head" in name else weight.copy_(
                of_target
            )
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification=verification)
    call = prompts(3) | {"max_new_tokens": 20, "do_sample": True, "top_k": 0, "temperature": 2.0}
    torch.manual_seed(0)
    plain = target.generate(**call)
    torch.manual_seed(0)
    text = target.generate(**call, custom_generate=strategy)
    assert strategy.report.accepted > 0
    assert torch.equal(text, plain) or verification != "coupled"
    assert (plain >= VOCAB_SIZE).any() == (size > draft_size)
    assert torch.equal(
        target.generate(**call | {"do_sample": False}, custom_generate=strategy),
        target.generate(**call | {"do_sample": False}),
    )


def test_other_sizes_without_one_tokenizer(tmp_path: Path):
    target, draft = padded(tmp_path / "target", VOCAB_SIZE, WORDS), padded(tmp_path / "draft", VOCAB_SIZE + 8, OTHERS)
    with pytest.raises(ValueError, match="the target scores 48 tokens and the draft 56; pass tokenizer= and draft_"):
        warned(target, draft)
    (tmp_path / "draft" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="the target scores 48 tokens and the draft 56; pass tokenizer= and draft_"):
        warned(target, draft)
    assert warned(target, draft, draft_tokenizer=tokenizer_of(WORDS)) == []


def test_a_draft_with_an_encoder_and_other_tokens():
    """It cannot be matched, so that nothing is said of doing so."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    models = [T5ForConditionalGeneration(T5Config(vocab_size=size, **sizes)).eval() for size in (48, 56)]
    message = "the target scores 48 tokens and the draft 56; choose a draft with the target's tokenizer"
    with pytest.raises(ValueError, match=message):
        models[0].generate(**prompts(2), max_new_tokens=4, custom_generate=SpeculativeDecoding(models[1]))
