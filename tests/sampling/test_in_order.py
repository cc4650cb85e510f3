"""What cannot be speculated exactly is decoded by transformers' own sampler, and the report says why."""

import pytest
import torch
import zoo
from all_pairs import all_pairs
from collectors import RowCollector
from tiny import near, prompts, tiny
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria

from hf_specx import Request, SpeculativeDecoding
from hf_specx.models.slots import CACHE


NEW_TOKENS = 24


class CallCount(LogitsProcessor):
    """Favours one token a call, counted from the first."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, (5 * self.calls) % scores.shape[1]] += 6
        return scores


class Trail(LogitsProcessor):
    """Keeps a moving average of what it was shown, and every prefix."""

    def __init__(self):
        self.average, self.prefixes = 0.0, []

    def __call__(self, input_ids, scores):
        self.average = 0.5 * self.average + scores
        self.prefixes.append(input_ids.clone())
        return scores - 0.3 * self.average


class Patience(StoppingCriteria):
    """Counts its calls; stops every third row a call from the seventh on."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        rows = torch.arange(len(input_ids))
        return (self.calls >= 7) & (rows <= (self.calls - 7) // 3)


class Unsure(StoppingCriteria):
    """Reads the scores of all rows, those that are finished among them."""

    def __call__(self, input_ids, scores, **kwargs):
        done = scores[-1].softmax(-1).amax(-1).mean() < 0.17
        return torch.full((len(input_ids),), bool(done))


class Together(StoppingCriteria):
    """Mixes rows: stops those that just emitted what another row did."""

    def __call__(self, input_ids, scores, **kwargs):
        last = input_ids[:, -1]
        return (last[:, None] == last).sum(1) > 1


PROCESSORS = {
    "calls": lambda: {"logits_processor": [CallCount()]},
    "trail": lambda: {"logits_processor": [Trail()], "repetition_penalty": 1.3},
    "and others": lambda: {"logits_processor": [CallCount()], "no_repeat_ngram_size": 2, "guidance_scale": 1.4},
}


def run(model: PreTrainedModel, inputs: dict, settings: dict, **strategy):
    """An output and the state that the generator is left in."""
    torch.manual_seed(5)
    output = model.generate(**inputs, **settings, **strategy)
    return output, torch.get_rng_state()


def text_of(output):
    return getattr(output, "sequences", output)


class Gumbel(LogitsProcessor):
    """Draws from the default generator, as a careless watermark might."""

    def __call__(self, input_ids, scores):
        return scores - torch.empty_like(scores).exponential_().log()


CASES = {f"processor: {k}": v for k, v in PROCESSORS.items()} | {
    "processor: noise": lambda: {"logits_processor": [Gumbel()]},
    "criterion: calls": lambda: {"stopping_criteria": [Patience()]},
    "criterion: mates": lambda: {"stopping_criteria": [Together()]},
    "criterion: scores": lambda: {
        "stopping_criteria": [Unsure()],
        "output_scores": True,
        "return_dict_in_generate": True,
    },
}
ENDS = [2, 7, 11, 19, 23, 33, 41, 46]


@pytest.mark.parametrize(("case", "do_sample", "eos_token_id"), all_pairs(CASES, [False, True], [None, ENDS]))
def test_equals_stock(case: str, do_sample: bool, eos_token_id: list | None):
    target = tiny()
    settings = {"do_sample": do_sample, "max_new_tokens": NEW_TOKENS, "eos_token_id": eos_token_id, "pad_token_id": 3}
    settings |= {"top_k": 0} if do_sample else {}
    expected, state = run(target, prompts(4), settings | CASES[case]())
    expected = text_of(expected)
    ends = torch.isin(expected[:, 11:], torch.tensor(eos_token_id or [])).int().argmax(-1)
    assert eos_token_id is None or len(set(ends.tolist())) > 1
    for options in ({"verification": "coupled"}, {"verification": "block", "layout": "ragged"}):
        strategy = SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4, **options)
        with pytest.warns(UserWarning, match="without any speed-up: .* must be shown each token once, in order"):
            output, left = run(target, prompts(4), settings | CASES[case](), custom_generate=strategy)
        assert torch.equal(text_of(output), expected)
        assert torch.equal(left, state)
        report = strategy.report
        assert (report.verification, report.layout, report.rounds, report.drafted) == ("plain", "plain", 0, 0)
        assert report.plain_steps == expected.shape[1] - 11
        if eos_token_id is not None:
            rows = [row.tolist() for row in expected[:, 11:]]
            ended = [next((n for n, token in enumerate(row, 1) if token in ENDS), len(row)) for row in rows]
            assert all(emitted <= number for emitted, number in zip(report.emitted_per_row, ended, strict=True))


@pytest.mark.parametrize("model_type", ["t5", "mamba2", "openai-gpt"])
def test_any_architecture(model_type: str):
    """Positions, encoders, states, and no cache at all."""
    target = zoo.build("seq2seq" if model_type in ("t5", "bart") else "causal", model_type)
    inputs, settings = zoo.inputs(target, 4), {"do_sample": True, "top_k": 0, "max_new_tokens": 14}
    expected, _ = run(target, inputs, settings | {"logits_processor": [Trail()]})
    strategy = SpeculativeDecoding(near(target, 0.03), num_draft_tokens=3, verification="coupled")
    output, _ = run(target, inputs, settings | {"logits_processor": [Trail()]}, custom_generate=strategy)
    assert torch.equal(output, expected)


def same(one, other) -> bool:
    """Whether two outputs hold equal tensors in equal places."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is None and other is None


LAYERS = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}


@pytest.mark.parametrize("model_type", ["gpt2", "t5"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_layers_of_a_dict_output(model_type: str, do_sample: bool):
    target = zoo.build("seq2seq" if model_type == "t5" else "causal", model_type)
    settings = {"do_sample": do_sample, "max_new_tokens": 9, "output_scores": True, "output_logits": True, **LAYERS}
    expected, _ = run(target, zoo.inputs(target, 3), settings)
    strategy = SpeculativeDecoding(near(target, 0.03))
    output, _ = run(target, zoo.inputs(target, 3), settings, custom_generate=strategy)
    assert type(output) is type(expected)
    assert output.keys() == expected.keys()
    assert all(same(output[name], expected[name]) for name in expected if name != CACHE)
    assert output.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    assert output.speculation_report is strategy.report
    assert "output_attentions=True" in strategy.report.layout_reason


@pytest.mark.parametrize("eos_token_id", [None, ENDS])
def test_a_stream_of_rows_has_no_pads(eos_token_id: list | None):
    target, inputs, stream = tiny(), prompts(3), RowCollector()
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": eos_token_id, "pad_token_id": 3}
    strategy = SpeculativeDecoding(near(target, 0.05), streamer=stream)
    output, _ = run(target, inputs, settings | {"logits_processor": [Trail()]}, custom_generate=strategy)
    for row, (mask, text) in enumerate(zip(inputs["attention_mask"].tolist(), output.tolist(), strict=True)):
        emitted = strategy.report.emitted_per_row[row]
        prompt, *parts = stream.rows[row]
        assert prompt == text[11 - sum(mask) : 11]
        assert [token for part in parts for token in part] == text[11 : 11 + emitted]
    assert sorted(stream.ended) == ([] if eos_token_id is None else [0, 1, 2])
    assert stream.ends == 1


def test_one_seed_is_that_of_a_row_alone():
    target, settings = tiny(), {"do_sample": True, "top_k": 0, "max_new_tokens": 9}
    torch.manual_seed(8)
    expected = target.generate(**prompts(1), **settings, logits_processor=[Trail()])
    strategy = SpeculativeDecoding(near(target, 0.05))
    before = torch.get_rng_state()
    output = target.generate(**prompts(1), **settings, logits_processor=[Trail()], seeds=[8], custom_generate=strategy)
    assert torch.equal(output, expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_of_several_rows_are_refused():
    given = {"logits_processor": [Trail()], "seeds": [1, 2], "custom_generate": SpeculativeDecoding(tiny())}
    with pytest.raises(ValueError, match="seeds= for 2 rows .* Trail may keep state.*call generate for each row"):
        tiny().generate(**prompts(2), do_sample=True, max_new_tokens=4, **given)
    assert tiny().generate(**prompts(2), do_sample=False, max_new_tokens=4, **given).shape == (2, 15)


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_request_among_others(logprobs: bool):
    """Its text and log-probabilities are those of a batch of one under its seed."""
    target, ids = tiny(), [4, 8, 15, 16, 23]
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 7}
    torch.manual_seed(3)
    kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    given = torch.tensor([ids])
    stock = target.generate(
        given, attention_mask=torch.ones_like(given), **settings, **kept, logits_processor=[Trail()]
    )
    requests = [ids, Request(ids, seed=3, logits_processor=[Trail()]), ids]
    strategy = SpeculativeDecoding(near(target, 0.05))
    done = list(strategy.generate_many(target, requests, ordered=True, logprobs=logprobs, **settings))
    new = stock.sequences[0, 5:]
    assert done[1].tokens == new.tolist()
    assert done[1].finish_reason == "length"
    if logprobs:
        for mine, theirs in ((done[1].logprobs, stock.scores), (done[1].raw_logprobs, stock.logits)):
            expected = torch.cat(theirs).log_softmax(-1).gather(-1, new[:, None])[:, 0]
            assert mine == pytest.approx(expected.tolist())
