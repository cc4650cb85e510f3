"""The drafters, driven by stock's own assisted decoding and by ours."""

import pytest
import torch
from scipy.stats import chisquare
from tiny import near, prompts, tiny
from transformers import LlamaForCausalLM
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specx import SampledCandidateGenerator, SpeculativeDecoding
from hf_specx.noise import GreedyRule, RejectionRule
from hf_specx.processors import Processors


class Assisted(LlamaForCausalLM):
    """A model whose assisted decoding drafts with our generator."""

    def _get_candidate_generator(self, generation_config, input_ids, logits_processor, assistant_model, **kwargs):
        rule = RejectionRule(True, input_ids.device) if generation_config.do_sample else GreedyRule()
        return SampledCandidateGenerator(
            assistant_model, Processors(logits_processor), rule, generation_config.max_length, self.vocab_size, 3
        )


def assisted(model: LlamaForCausalLM) -> Assisted:
    copy = Assisted(model.config).eval()
    copy.load_state_dict(model.state_dict())
    return copy


@pytest.mark.parametrize("noise", [0.0, 0.05, 2.0])
def test_stock_loop_greedy_equals_plain(noise: float):
    target = tiny("llama")
    ids = prompts(1)["input_ids"]
    expected = target.generate(ids, do_sample=False, max_new_tokens=40, repetition_penalty=1.2)
    output = assisted(target).generate(
        ids, do_sample=False, max_new_tokens=40, repetition_penalty=1.2, assistant_model=near(target, noise)
    )
    assert torch.equal(output, expected)


def test_stock_loop_sampled_law_is_exact():
    """Two tokens after the prompt's first, 2,500 runs; false alarm 1e-4."""
    target = tiny("llama", vocab_size=4, hidden_size=16, num_hidden_layers=1, initializer_range=0.6)
    draft = tiny("llama", seed=5, vocab_size=4, hidden_size=16, num_hidden_layers=1, initializer_range=0.6)
    model, prompt = assisted(target), torch.tensor([[1, 2, 3]])
    torch.manual_seed(0)
    counts = torch.zeros(4, 4)
    for _ in range(2500):
        first, second = model.generate(
            prompt, do_sample=True, top_k=3, temperature=0.9, max_new_tokens=2, assistant_model=draft
        )[0, 3:].tolist()
        counts[first, second] += 1
    law = torch.zeros(4, 4, dtype=torch.float64)
    for first in range(4):
        texts = torch.tensor([[1, 2, 3, first]])
        with torch.no_grad():
            logits = target(texts).logits[0, -2:].double() / 0.9
        p = logits.masked_fill(logits < logits.topk(3).values[:, -1:], -torch.inf).softmax(-1)
        law[first] = p[0, first] * p[1]
    assert counts[law == 0].sum() == 0
    seen = law > 0
    assert seen.sum() == 9
    assert chisquare(counts[seen], 2500 * law[seen]).pvalue > 1e-4


@pytest.mark.parametrize("do_sample", [False, True])
def test_any_other_generator_is_exact_too(do_sample: bool):
    target = tiny("llama")
    inputs, settings = prompts(4), {"do_sample": do_sample, "top_k": 8, "max_new_tokens": 40}
    torch.manual_seed(1)
    expected = target.generate(**inputs, **settings)
    lookup = PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=1, max_length=200)
    strategy = SpeculativeDecoding(lookup)
    torch.manual_seed(1)
    assert torch.equal(target.generate(**inputs, **settings, custom_generate=strategy), expected)
    assert strategy.verification == "coupled"
    assert strategy.report.drafted > 0


@pytest.mark.parametrize("sizes", [(48, 40), (40, 48)])
def test_padded_vocabularies_of_one_tokenizer(sizes: tuple[int, int]):
    """Sizes may differ where the tokenizers are known to be the same."""

    class Tokenizer:
        def get_vocab(self):
            return {str(i): i for i in range(40)}

    target, draft = (tiny("llama", seed=seed, vocab_size=size) for seed, size in zip((0, 3), sizes, strict=True))
    inputs = prompts(4)
    inputs["input_ids"] %= 40
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}
    torch.manual_seed(1)
    expected = target.generate(**inputs, **settings)
    for verification in ("coupled", "block", "token"):
        strategy = SpeculativeDecoding(
            draft,
            num_draft_tokens=3,
            verification=verification,
            tokenizer=Tokenizer(),
            draft_tokenizer=Tokenizer(),
        )
        torch.manual_seed(1)
        output = target.generate(**inputs, **settings, custom_generate=strategy)
        assert torch.equal(output, expected) or verification != "coupled"
