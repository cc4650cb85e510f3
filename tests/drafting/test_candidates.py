"""The drafters, driven by stock's own assisted decoding and by ours."""

import pytest
import torch
from enumerated import Tokenizer
from scipy.stats import chisquare
from tiny import Forwards, near, prompts, tiny
from transformers import LlamaForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator
from transformers.generation.logits_process import LogitsProcessorList
from wrong_rules import GreedyDraft

from hf_specx import SampledCandidateGenerator, SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.verifiers import GreedyVerifier, RejectionVerifier


class Assisted(LlamaForCausalLM):
    """A model whose assisted decoding drafts with our generator."""

    verifier = RejectionVerifier

    def _get_candidate_generator(self, generation_config, input_ids, logits_processor, assistant_model, **kwargs):
        verifier = self.verifier(False, input_ids.device) if generation_config.do_sample else GreedyVerifier()
        return SampledCandidateGenerator(assistant_model, Processors(logits_processor), verifier, self.vocab_size, 3)


def assisted(model: LlamaForCausalLM) -> Assisted:
    copy = Assisted(model.config).eval()
    copy.load_state_dict(model.state_dict())
    return copy


def test_stock_loop_greedy_equals_plain(monkeypatch: pytest.MonkeyPatch):
    """And reads back no more of the text than is new."""
    target, settings, read = tiny("llama"), {"do_sample": False, "max_new_tokens": 40, "repetition_penalty": 1.2}, []
    emit = Batch.emit
    monkeypatch.setattr(
        Batch, "emit", lambda batch, new, numbers: read.append(new.shape[1]) or emit(batch, new, numbers)
    )
    output = assisted(target).generate(**prompts(1), **settings, assistant_model=near(target, 0.05))
    assert torch.equal(output, target.generate(**prompts(1), **settings))
    assert len(read) > 5 < sum(read)
    assert max(read) <= 4


def stock_loop_p_value(verifier: type[RejectionVerifier]) -> float:
    """Tokens 3 and 4 of 5, given all before them summed out, over 900 runs of stock's loop with our drafts."""
    sizes = {"vocab_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "initializer_range": 0.6}
    target, draft, prompt = tiny("llama", **sizes), tiny("llama", seed=5, **sizes), torch.tensor([[1, 2, 3]])
    model = assisted(target)
    model.verifier = verifier
    torch.manual_seed(0)
    counts = torch.zeros(4, 4)
    for _ in range(900):
        text = model.generate(
            prompt, do_sample=True, top_k=3, temperature=0.9, max_new_tokens=5, assistant_model=draft
        )
        counts[text[0, 5], text[0, 6]] += 1
    texts = torch.cartesian_prod(*[torch.arange(4)] * 4)
    with torch.no_grad():
        logits = target(torch.cat([prompt.expand(256, -1), texts], 1)).logits[:, 2:-1].double() / 0.9
    laws = logits.masked_fill(logits < logits.topk(3).values[..., -1:], -torch.inf).softmax(-1)
    joint = laws.gather(-1, texts[..., None])[..., 0].prod(-1).view(4, 4, 4, 4).sum((0, 1))
    assert counts[joint == 0].sum() == 0
    return chisquare(counts[joint > 0], 900 * joint[joint > 0]).pvalue


@pytest.mark.slow
def test_stock_loop_sampled_law_is_exact():
    """False alarm 1e-4; several rounds each, after partial and after full acceptance. A wrong one is seen."""
    assert stock_loop_p_value(RejectionVerifier) > 1e-4
    assert stock_loop_p_value(GreedyDraft) < 1e-8


class Noted(PromptLookupCandidateGenerator):
    """Notes what it is asked, what it proposes, and what it is told of the outcome."""

    def __init__(self):
        super().__init__(num_output_tokens=4, max_matching_ngram_size=1, max_length=200)
        self.asked, self.proposed, self.outcomes = [], [], []

    def get_candidates(self, input_ids):
        candidates, _ = super().get_candidates(input_ids)
        self.asked.append(input_ids[0].tolist())
        self.proposed.append(candidates.shape[1] - input_ids.shape[1])
        return candidates, None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.outcomes.append((input_ids[0].tolist(), scores[0], int(num_matches)))


class Looked(LlamaForCausalLM):
    """A model whose assisted decoding asks such a generator."""

    def _get_candidate_generator(self, **kwargs):
        return self.noted


@pytest.mark.parametrize("ends", [False, True])
def test_a_generator_is_told_what_was_kept_as_in_stock(ends: bool):
    """The text, processed scores and the number of matches; stock also asks before the first token."""
    target, stock = tiny("llama"), Looked(tiny("llama").config).eval()
    stock.load_state_dict(target.state_dict())
    stock.noted, ours = Noted(), Noted()
    settings = {"do_sample": False, "max_new_tokens": 40, "repetition_penalty": 1.1}
    if ends:
        settings["eos_token_id"] = int(target.generate(**prompts(1), **settings)[0, 11 + 30])
    expected = stock.generate(**prompts(1), **settings, assistant_model=tiny("llama"))
    output = target.generate(**prompts(1), **settings, custom_generate=SpeculativeDecoding(ours, num_draft_tokens=4))
    assert torch.equal(output, expected)
    stocks, compared = {len(text): (text, scores, matches) for text, scores, matches in stock.noted.outcomes}, 0
    for text, scores, matches in ours.outcomes:
        assert text == output[0, : len(text)].tolist()
        if len(text) in stocks and len(scores) == len(stocks[len(text)][1]):
            assert (text, matches) == (stocks[len(text)][0], stocks[len(text)][2])
            reached = matches + 1 if ends else len(scores)  # scores behind an end token mean nothing
            torch.testing.assert_close(scores[:reached], stocks[len(text)][1][:reached], rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared > 3


def test_a_generator_proposes_as_much_as_it_has_and_that_is_what_is_counted():
    """Cut to what its row can emit; nothing is filled up with a token that nobody proposed."""
    target, noted = tiny("llama"), Noted()
    inputs = {"input_ids": prompts(4)["input_ids"], "attention_mask": torch.ones(4, 11, dtype=torch.int64)}
    strategy = SpeculativeDecoding(noted, num_draft_tokens=6)
    output = target.generate(**inputs, do_sample=False, max_new_tokens=40, custom_generate=strategy)
    drafted = [len(scores) - 1 for _, scores, _ in noted.outcomes]
    asked = zip(noted.asked, noted.proposed, strict=True)
    assert drafted == [min(proposed, 11 + 40 - len(text) - 1) for text, proposed in asked]
    assert {0, 4} <= set(drafted)
    assert strategy.report.drafted == sum(drafted)
    assert strategy.report.accepted == sum(matches for _, _, matches in noted.outcomes)
    assert torch.equal(output, target.generate(**inputs, do_sample=False, max_new_tokens=40))


def test_generators_that_cannot_serve_are_refused():
    draft = tiny(seed=1)
    config = draft.generation_config
    assistant = AssistedCandidateGenerator(prompts(1)["input_ids"], draft, config, {})
    ours = SampledCandidateGenerator(draft, Processors(LogitsProcessorList()), GreedyVerifier(), 48)
    for generator in (assistant, ours):
        with pytest.raises(ValueError, match=f"{type(generator).__name__}, made for one text"):
            SpeculativeDecoding(generator)


@pytest.mark.parametrize("sizes", [(48, 40), (40, 48)])
def test_padded_vocabularies_of_one_tokenizer(sizes: tuple[int, int]):
    """Sizes may differ where the tokenizers are known to be the same; the law with them is in test_law."""
    target, draft = (tiny("llama", seed=seed, vocab_size=size) for seed, size in zip((0, 3), sizes, strict=True))
    inputs = prompts(4)
    inputs["input_ids"] %= 40
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}
    torch.manual_seed(1)
    expected = target.generate(**inputs, **settings)
    tokenizers = {"tokenizer": Tokenizer(), "draft_tokenizer": Tokenizer()}
    torch.manual_seed(1)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification="coupled", **tokenizers)
    assert torch.equal(target.generate(**inputs, **settings, custom_generate=strategy), expected)


def test_the_draft_is_fed_no_more_than_it_has_not_seen():
    target = tiny()
    for noise in (0.0, 0.05, 2.0):
        draft = near(target, noise)
        strategy = SpeculativeDecoding(draft, num_draft_tokens=4, verification="coupled")
        with Forwards(draft) as forwards:
            target.generate(**prompts(4), do_sample=True, max_new_tokens=40, custom_generate=strategy)
        assert forwards.lengths[:2] == [11, 1]
        assert max(forwards.lengths[1:]) <= 2
