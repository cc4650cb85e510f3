"""Bad input: one clear ValueError before any forward, naming the value and the remedy, with nothing changed."""

import copy
import re

import pytest
import torch
from tiny import Forwards, near, prompts, tiny
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertLMHeadModel,
    GenerationConfig,
    PreTrainedModel,
    TextStreamer,
)
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria

from hf_specx import SpeculativeDecoding, generate
from hf_specx.checks import check_call, check_target


class Tokens:
    """A tokenizer as far as the check reads it."""

    def __init__(self, size: int, first: str = "0"):
        self.vocab = {first: 0} | {str(i): i for i in range(1, size)}

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


class Counting(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


class Impatient(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


LOOKUP = PromptLookupCandidateGenerator(num_output_tokens=3, max_length=50)

OPTIONS = [
    ({"num_draft_tokens": 0}, "num_draft_tokens=0 is below 1; give 1 or more"),
    ({"num_draft_tokens": -3}, "num_draft_tokens=-3 is below 1"),
    ({"num_draft_tokens": "many"}, "num_draft_tokens='many' is not a number; give an int"),
    ({"num_draft_tokens": 2.5}, "num_draft_tokens=2.5 is not a number"),
    ({"num_draft_tokens": True}, "num_draft_tokens=True is not a number"),
    ({"verification": "typical"}, "verification='typical' is unknown; choose one of token, block, coupled"),
    ({"layout": "diagonal"}, "layout='diagonal' is unknown; choose one of auto, ragged"),
    ({"compile": True}, "compile=True is not available in this version; use compile=False"),
    ({"num_drafts": 5}, "unknown option 'num_drafts'; known: num_draft_tokens"),
    ({"costs": {}}, "costs is a dict without table and best_num_draft_tokens; leave it out"),
    ({"streamer": 3}, "streamer is a int without put and end; leave it out"),
    ({"tokenizer": "x"}, "tokenizer is a str without get_vocab; leave it out"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options(options: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        SpeculativeDecoding(tiny(), **options)


def test_options_that_contradict_the_draft():
    with pytest.raises(ValueError, match="verification='block' needs the law.*use verification='coupled'"):
        SpeculativeDecoding(LOOKUP, verification="block")
    with pytest.raises(ValueError, match="draft_model is a str; give a model or a CandidateGenerator"):
        SpeculativeDecoding("org/draft")


def holed_mask() -> torch.Tensor:
    mask = prompts(4)["attention_mask"].clone()
    mask[0, -3] = 0
    return mask


def right_padded() -> torch.Tensor:
    mask = torch.ones(4, 11, dtype=torch.int64)
    mask[2, -2:] = 0
    return mask


CALLS = {
    "beams": ({"num_beams": 3}, "num_beams=3 is beam search; set num_beams=1"),
    "early exit": ({"assistant_early_exit": 1}, "assistant_early_exit=1 selects early exit; leave it out"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 selects prompt lookup"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 selects contrastive search"),
    "DoLa": ({"dola_layers": "low"}, "dola_layers='low' selects DoLa"),
    "mixture": ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight=0.5 selects a mixture"),
    "no cache": ({"use_cache": False}, "use_cache=False cannot be honoured"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static' cannot be honoured"),
    "chunks": ({"prefill_chunk_size": 4}, "prefill_chunk_size=4 is not available"),
    "right padding": ({"attention_mask": right_padded()}, "row 2 of attention_mask ends in 0.*padding_side='left'"),
    "empty row": (
        {"attention_mask": torch.ones(4, 11, dtype=torch.int64).index_fill(0, torch.tensor(1), 0)},
        "the prompt of row 1 is empty",
    ),
    "holes": ({"attention_mask": holed_mask()}, "attention_mask has zeros between tokens"),
    "scores": (
        {"return_dict_in_generate": True, "output_scores": True},
        "output_scores=True is not available with speculative decoding in this version",
    ),
    "stateful processor": ({"logits_processor": [Counting()]}, "Counting may keep state.*stateless = True"),
    "stateful criterion": ({"stopping_criteria": [Impatient()]}, "Impatient may count calls.*stateless = True"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls(case: str):
    settings, message = CALLS[case]
    target, draft = tiny(), tiny(seed=1)
    before = [copy.deepcopy(m.generation_config.to_dict()) for m in (target, draft)]
    inputs = {"input_ids": prompts(4)["input_ids"], "attention_mask": torch.ones(4, 11, dtype=torch.int64)}
    with Forwards(target) as forwards, Forwards(draft) as draft_forwards, pytest.raises(ValueError, match=message):
        target.generate(**inputs | settings, max_new_tokens=5, custom_generate=SpeculativeDecoding(draft))
    assert not forwards.lengths
    assert not draft_forwards.lengths
    assert [m.generation_config.to_dict() for m in (target, draft)] == before


def test_multi_token_prediction_is_refused():
    target = tiny()
    config = GenerationConfig(use_mtp=True, max_new_tokens=3)
    with pytest.raises(ValueError, match="use_mtp=True selects multi-token"):
        target.generate(**prompts(1), generation_config=config, custom_generate=SpeculativeDecoding(tiny(seed=1)))


def test_empty_prompts_are_refused():
    strategy, target = SpeculativeDecoding(tiny(seed=1)), tiny()
    config = copy.deepcopy(target.generation_config)
    config.max_length = 5
    with pytest.raises(ValueError, match="the prompt is empty.*pass at least one token"):
        strategy(target, torch.empty(2, 0, dtype=torch.int64), [], [], config)


def seq2seq() -> PreTrainedModel:
    sizes = {"vocab_size": 48, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 16}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes)).eval()


PAIRS = {
    "sizes": (lambda: tiny(seed=1, vocab_size=50), {}, "the target has 48 tokens and the draft 50.*pass tokenizer="),
    "tokens": (
        lambda: tiny(seed=1),
        {"tokenizer": Tokens(48), "draft_tokenizer": Tokens(48, "zero")},
        "the two tokenizers differ, for instance in '0' with id 0",
    ),
    "encoder-decoder draft": (seq2seq, {}, "T5ForConditionalGeneration is an encoder-decoder.*choose a decoder-only"),
}


@pytest.mark.parametrize("case", PAIRS)
def test_pairs(case: str):
    draft, options, message = PAIRS[case]
    with pytest.raises(ValueError, match=message):
        tiny().generate(**prompts(2), max_new_tokens=3, custom_generate=SpeculativeDecoding(draft(), **options))


def test_meta_parameters_are_refused():
    with torch.device("meta"):
        empty = tiny(seed=1)
    with pytest.raises(ValueError, match="the draft model has parameters on the meta device and no offload hook"):
        tiny().generate(**prompts(2), max_new_tokens=3, custom_generate=SpeculativeDecoding(empty))
    with pytest.raises(ValueError, match="the target model has parameters on the meta device"):
        check_target(empty, 10)


def test_targets_that_are_refused():
    inputs, strategy = prompts(2), SpeculativeDecoding(tiny(seed=1))
    with pytest.raises(ValueError, match=r"the target is in training mode.*call target.eval\(\)"):
        tiny().train().generate(**inputs, max_new_tokens=3, custom_generate=strategy)
    dropout = SpeculativeDecoding(tiny(seed=1).train())
    with pytest.raises(ValueError, match=r"the draft is in training mode.*call draft.eval\(\)"):
        tiny().generate(**inputs, max_new_tokens=3, custom_generate=dropout)
    encoder = BertLMHeadModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)).eval()
    with pytest.raises(ValueError, match="BertLMHeadModel attends in both directions.*set is_decoder=True"):
        check_target(encoder, 10)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length(rope_type: str):
    """Within the original length it is the plain one and exact; behind it, stock switches at another step."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"original_max_position_embeddings": 24, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    target = tiny(rope_parameters=rope, max_position_embeddings=24 if rope_type == "dynamic" else 48)
    settings = {"do_sample": False, "custom_generate": SpeculativeDecoding(near(target, 0.05), num_draft_tokens=4)}
    expected = target.generate(**prompts(3), do_sample=False, max_new_tokens=13)
    assert torch.equal(target.generate(**prompts(3), **settings, max_new_tokens=13), expected)
    with pytest.raises(ValueError, match=f"rope_type='{rope_type}' changes its frequencies behind position 24"):
        target.generate(**prompts(3), **settings, max_new_tokens=14)


class Closing:
    """A streamer that notes whether it was ended."""

    ended = False

    def put(self, value):
        pass

    def end(self):
        self.ended = True


@pytest.mark.parametrize("name", ["streamer", "assistant_model", "synced_gpus", "tokenizer", "assistant_tokenizer"])
def test_what_transformers_would_drop_is_refused(name: str):
    value = {"streamer": Closing(), "assistant_model": tiny(seed=1), "synced_gpus": True}.get(name, Tokens(48))
    target = tiny()
    with Forwards(target) as forwards, pytest.raises(ValueError, match=f"does not pass {name}= on"):
        target.generate(
            **prompts(1), max_new_tokens=3, custom_generate=SpeculativeDecoding(tiny(seed=1)), **{name: value}
        )
    assert not forwards.lengths
    assert getattr(value, "ended", True)


def test_coupled_needs_a_generator_that_can_be_read():
    with pytest.raises(ValueError, match="cannot redraw stock's noise on device type 'meta'; use 'block' there"):
        check_call(torch.ones(1, 3, device="meta"), GenerationConfig(), {}, "coupled", False)


def test_a_refusal_ends_the_streamer():
    streamer = Closing()
    strategy = SpeculativeDecoding(tiny(seed=1), streamer=streamer)
    with pytest.raises(ValueError, match="use_cache=False"):
        tiny().generate(**prompts(1), max_new_tokens=3, use_cache=False, custom_generate=strategy)
    assert streamer.ended


def test_a_streamer_takes_one_row():
    strategy = SpeculativeDecoding(tiny(seed=1), streamer=TextStreamer(tokenizer=None))
    with pytest.raises(ValueError, match="a streamer takes one row, and the batch has 2"):
        tiny().generate(**prompts(2), max_new_tokens=3, custom_generate=strategy)


def test_the_function_needs_a_draft_and_a_tokenizer_for_stop_strings():
    with pytest.raises(ValueError, match="no draft: pass draft_model= or assistant_model="):
        generate(**prompts(1), model=tiny())
    with pytest.raises(ValueError, match=r"stop_strings=\['x'\] needs the tokenizer; pass tokenizer="):
        generate(**prompts(1), model=tiny(), draft_model=tiny(seed=1), stop_strings=["x"])
    with pytest.raises(ValueError, match="synced_gpus=True is not available"):
        generate(**prompts(1), model=tiny(), draft_model=tiny(seed=1), synced_gpus=True)
