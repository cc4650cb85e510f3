"""Plain and speculative generation in turns: which inputs, which tokens count, and what is said of the machine."""

import pytest
import torch
from tiny import Forwards, near, tiny
from tiny_tokenizer import PAD, TEXTS, tiny_tokenizer
from transformers import T5Config, T5ForConditionalGeneration

from hf_specx import Costs, SpeculativeDecoding
from hf_specx.bench.inputs import emitted, encode
from hf_specx.bench.store import provenance
from hf_specx.bench.timer import compare


def t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": 280, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=1, eos_token_id=0)).eval()


@pytest.mark.parametrize("side", ["left", "right"])
def test_encode_pads_where_the_model_wants_it(side):
    tokenizer = tiny_tokenizer()
    expected = tokenizer(list(TEXTS), return_tensors="pt", padding=True, padding_side=side)
    found = encode(tokenizer, tiny(vocab_size=280) if side == "left" else t5(), list(TEXTS), 4)
    assert torch.equal(found["input_ids"], expected["input_ids"])
    assert torch.equal(found["attention_mask"], expected["attention_mask"])


def test_encode_without_a_pad_token():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    found = encode(tokenizer, tiny(vocab_size=280), list(TEXTS), 4)
    expected = tiny_tokenizer()(list(TEXTS), return_tensors="pt", padding=True)
    assert torch.equal(found["attention_mask"], expected["attention_mask"])
    assert tokenizer.pad_token is None
    assert PAD in tokenizer.get_vocab()


def test_runs_take_batches_in_turns():
    target = tiny()
    batches = [{"input_ids": torch.full((2, width), 5), "attention_mask": torch.ones(2, width)} for width in (6, 7)]
    steps = []
    with Forwards(target) as forwards:
        found = compare(
            target,
            SpeculativeDecoding(near(target, 0.05), num_draft_tokens=2, costs=known_costs(2)),
            batches,
            {"max_new_tokens": 2, "do_sample": False},
            repeats=3,
            advance=lambda: steps.append(1),
        )
    prompts = [width for width in forwards.lengths if width >= 6]
    assert prompts == [6, 6, 6, 6, 7, 7, 6, 6]  # plain and ours: the warm-up, then three runs
    assert len(steps) == 2 * (3 + 1)
    assert found.plain.tokens == found.ours.tokens == [4, 4, 4]
    assert len(found.reports) == 3


def test_each_run_has_its_seed(monkeypatch):
    """The same for plain and for ours."""
    seeds = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    target, inputs = tiny(), {"input_ids": torch.full((1, 4), 5), "attention_mask": torch.ones(1, 4)}
    strategy = SpeculativeDecoding(target, num_draft_tokens=2, costs=known_costs(1))
    seeds.clear()
    compare(target, strategy, [inputs], {"max_new_tokens": 2, "do_sample": False}, repeats=3, seed=7)
    assert seeds == [7, 7, 7, 7, 8, 8, 9, 9]  # the first two warm up


def known_costs(batch):
    return Costs({batch: {"target": {1: 1.0, 9: 2.0}, "draft": 0.1}})


def test_tokens_of_an_encoder_decoder_are_the_decoders():
    target = t5()
    inputs = {"input_ids": torch.full((2, 9), 5), "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    strategy = SpeculativeDecoding(target, num_draft_tokens=2, costs=known_costs(2))
    found = compare(target, strategy, [inputs], options, repeats=1)
    assert found.plain.tokens == found.ours.tokens == [6]


def test_provenance_names_the_machine():
    found = provenance(tiny())
    assert found["device"].startswith("cpu (")
    assert (found["dtype"], found["torch"]) == ("float32", torch.__version__)


@pytest.mark.parametrize(
    ("end_ids", "texts"),
    [
        (1, [[5, 1], [5, 6, 7], [2, 5, 1]]),
        ([1, 2], [[5, 1], [5, 6, 7], [2]]),
        (None, [[5, 1, 1], [5, 6, 7], [2, 5, 1]]),
    ],
)
def test_rows_end_with_their_first_end_token(end_ids, texts):
    output = torch.tensor([[9, 9, 5, 1, 1], [9, 1, 5, 6, 7], [9, 9, 2, 5, 1]])
    inputs, options = {"input_ids": output[:, :2]}, {"eos_token_id": end_ids}
    assert emitted(tiny(), inputs, output, options) == texts
    assert emitted(tiny(eos_token_id=end_ids), inputs, output, {}) == texts
    assert emitted(tiny(), inputs, output[:, :2], options) == [[], [], []]
    # an encoder-decoder's output begins with the token that its decoder starts from
    assert emitted(t5(), {"input_ids": torch.full((3, 9), 5)}, output[:, 1:], options) == texts


def test_what_fails_is_raised():
    """A comparison without one of the two says nothing; only the bench goes on with the others."""
    target, inputs = tiny(), {"input_ids": torch.full((1, 4), 5), "attention_mask": torch.ones(1, 4)}
    strategy = SpeculativeDecoding(target, num_draft_tokens=2, costs=known_costs(1))
    with pytest.raises(ValueError, match="num_beams=2"):  # which plain generate takes
        compare(target, strategy, [inputs], {"max_new_tokens": 2, "do_sample": False, "num_beams": 2}, repeats=1)
