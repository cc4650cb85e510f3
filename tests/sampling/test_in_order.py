"""What cannot be speculated exactly is decoded by transformers' own sampler, and the report says why."""

import warnings

import pytest
import torch
import zoo
from all_pairs import each_value
from criteria import Counting
from plain import assert_plain, coupled
from tiny import near, prompts, tiny
from torch.utils._pytree import tree_leaves
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria

from hf_specx import SpeculativeDecoding
from hf_specx.models.slots import CACHE


NEW_TOKENS = 24
LAYERS = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}


class Trail(LogitsProcessor):
    """Keeps a moving average of what it was shown, and every prefix."""

    def __init__(self):
        self.average, self.prefixes = 0.0, []

    def __call__(self, input_ids, scores):
        self.average = 0.5 * self.average + scores
        self.prefixes.append(input_ids.clone())
        return scores - 0.3 * self.average


class Unsure(StoppingCriteria):
    """Reads the scores of all rows, those that are finished among them."""

    def __call__(self, input_ids, scores, **kwargs):
        done = scores[-1].softmax(-1).amax(-1).mean() < 0.17
        return torch.full((len(input_ids),), bool(done))


class Counted(StoppingCriteria):
    def __init__(self):
        self.steps = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.steps += 1
        return 4 * torch.arange(1, len(input_ids) + 1) <= self.steps


class Gumbel(LogitsProcessor):
    """Draws from the default generator, as a careless watermark might."""

    def __call__(self, input_ids, scores):
        return scores - torch.empty_like(scores).exponential_().log()


CASES = {
    "processor: trail": lambda: {"logits_processor": [Trail()], "repetition_penalty": 1.3},
    "processor: and others": lambda: {
        "logits_processor": [Counting()],
        "no_repeat_ngram_size": 2,
        "guidance_scale": 1.4,
    },
    "processor: noise": lambda: {"logits_processor": [Gumbel()]},
    "criterion: counted": lambda: {"stopping_criteria": [Counted()]},
    "criterion: scores": lambda: {
        "stopping_criteria": [Unsure()],
        "output_scores": True,
        "return_dict_in_generate": True,
    },
}
ENDS = [2, 7, 11, 19, 23, 33, 41, 46]


@pytest.mark.parametrize(("case", "do_sample", "eos_token_id"), each_value(CASES, [False, True], [None, ENDS]))
def test_equals_stock(case: str, do_sample: bool, eos_token_id: list | None):
    target = tiny()
    settings = {"do_sample": do_sample, "max_new_tokens": NEW_TOKENS, "eos_token_id": eos_token_id, "pad_token_id": 3}
    settings |= {"top_k": 0} if do_sample else {}
    for options in ({"verification": "coupled"}, {"verification": "block", "layout": "ragged"}):
        strategy = coupled(target, 0.05, **options)
        with pytest.warns(UserWarning, match="in order"):
            text = assert_plain(target, strategy, fresh=CASES[case], seed=5, **settings).text[:, 11:]
        report = strategy.report
        assert (report.verification, report.layout, report.rounds, report.drafted) == ("plain", "plain", 0, 0)
        assert report.plain_steps == text.shape[1]
        if eos_token_id is not None:
            ended = [next((n for n, token in enumerate(row, 1) if token in ENDS), len(row)) for row in text.tolist()]
            assert all(emitted <= number for emitted, number in zip(report.emitted_per_row, ended, strict=True))
            assert len(set(ended)) > 1
        else:
            assert report.emitted_per_row == [text.shape[1]] * len(text)  # rows that have ended go on without pads


def test_each_reason_is_told_once():
    target, settings = tiny(), {"do_sample": False, "max_new_tokens": 2}
    strategy = coupled(target, 0.05)
    for word, options in (("Trail", {"logits_processor": [Trail()]}), ("output_attentions=True", LAYERS)):
        with pytest.warns(UserWarning, match=word):
            target.generate(**prompts(2), **settings, **options, custom_generate=strategy)
        with warnings.catch_warnings(action="error"):
            target.generate(**prompts(2), **settings, **options, custom_generate=strategy)


@pytest.mark.parametrize("model_type", ["t5", "mamba2", "openai-gpt"])
def test_any_architecture(model_type: str):
    target = zoo.build("seq2seq" if model_type == "t5" else "causal", model_type)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 14}
    assert_plain(target, coupled(target, 0.03), zoo.inputs(target, 4), CASES["processor: trail"], **settings)


@pytest.mark.filterwarnings("ignore")  # torch will have these elsewhere
def test_layers_that_quantise_all_of_a_forward_by_one_scale():
    """A token's scores then depend on the others, also in a queue."""
    model, draft, options = tiny(), near(tiny(), 0.1), {"max_new_tokens": 20, "do_sample": False}
    target = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    strategy = SpeculativeDecoding(draft)
    expected = target.generate(**prompts(3), **options)
    assert torch.equal(target.generate(**prompts(3), **options, custom_generate=strategy), expected)
    assert "torch.ao" in strategy.report.layout_reason
    alone = target.generate(**prompts(1), **options)[0, 11:].tolist()
    requests = prompts(1)["input_ids"].repeat(3, 1).tolist()
    assert [done.tokens for done in strategy.generate_many(target, requests, **options)] == [alone] * 3


@pytest.mark.parametrize("model_type", ["gpt2", "t5"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_layers_of_a_dict_output(model_type: str, do_sample: bool):
    target = zoo.build("seq2seq" if model_type == "t5" else "causal", model_type)
    settings = {"do_sample": do_sample, "max_new_tokens": 9, "output_scores": True, "output_logits": True, **LAYERS}
    strategy, outputs = SpeculativeDecoding(near(target, 0.03)), []
    for custom_generate in (None, strategy):
        torch.manual_seed(5)
        outputs.append(target.generate(**zoo.inputs(target, 3), **settings, custom_generate=custom_generate))
    expected, output = outputs
    assert type(output) is type(expected)
    assert output.keys() == expected.keys()
    for name in output.keys() - {CACHE}:
        torch.testing.assert_close(tree_leaves(output[name]), tree_leaves(expected[name]), rtol=0, atol=0)
    assert output.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    assert output.speculation_report is strategy.report
    assert "output_attentions=True" in strategy.report.layout_reason


def test_seeds():
    """One is that of a row alone; those of several rows are refused, unless they say nothing."""
    target, settings = tiny(), {"do_sample": True, "top_k": 0, "max_new_tokens": 9}
    stateful = {"logits_processor": [Trail()], "custom_generate": SpeculativeDecoding(near(target, 0.05))}
    torch.manual_seed(8)
    expected = target.generate(**prompts(1), **settings, logits_processor=[Trail()])
    before = torch.get_rng_state()
    assert torch.equal(target.generate(**prompts(1), **settings, **stateful, seeds=[8]), expected)
    assert torch.equal(torch.get_rng_state(), before)
    stateful["logits_processor"] = [Trail()]
    with pytest.raises(ValueError, match="Trail"):
        target.generate(**prompts(2), **settings, **stateful, seeds=[1, 2])
    greedy = target.generate(**prompts(2), do_sample=False, max_new_tokens=4, **stateful, seeds=[1, 2])
    assert greedy.shape == (2, 15)
