"""Facts of transformers that hf_specx relies on, and that no other test would notice if another version moved them.

Most of what it relies on is seen elsewhere: texts, outputs and caches are compared with those of `generate`. Here is
what would pass unseen. A message begins with the room that relies on the fact.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import VOCAB_SIZE, prompts, tiny
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import logits_process, stopping_criteria, utils
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specx.engine.reasons import RARE_PROCESSORS
from hf_specx.models.slots import CACHE
from hf_specx.sampling.processors import STATELESS, WARPERS, LikeliestToken


GENERATE = """
    self inputs generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn synced_gpus
    assistant_model streamer negative_prompt_ids negative_prompt_attention_mask custom_generate kwargs
"""
OTHERS = {"PrefixConstrainedLogitsProcessor"}  # with a treatment of their own
OF_ONE_MODEL = """
    ClassifierFreeGuidanceLogitsProcessor AlternatingCodebooksLogitsProcessor BarkEosPrioritizerLogitsProcessor
    DiaClassifierFreeGuidanceLogitsProcessor DiaEOSChannelFilterLogitsProcessor DiaEOSDelayPatternLogitsProcessor
"""  # put there by generate methods of single models, with meanings of their own
CRITERIA = {"MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria", "ConfidenceCriteria"}
BUILT: dict[str, Any] = {"sequence_bias": {(3,): 1.0, (4, 5): 2.0}, "bad_words_ids": [[7], [8, 9]]}
BUILT |= {"repetition_penalty": 1.3, "exponential_decay_length_penalty": (3, 1.1)}
BUILT |= {"no_repeat_ngram_size": 3, "min_length": 13, "min_new_tokens": 2}
BUILT |= {"forced_bos_token_id": 5, "forced_eos_token_id": 6, "suppress_tokens": [10], "begin_suppress_tokens": [11]}
BUILT |= {"temperature": 0.7, "top_h": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.98}
BUILT |= {"epsilon_cutoff": 0.001, "eta_cutoff": 0.001, "renormalize_logits": True, "remove_invalid_values": True}


def test_arguments_of_generate():
    found = list(inspect.signature(GenerationMixin.generate).parameters)
    assert found == GENERATE.split(), "pairs: the function `generate` does not pass all of these on"


def test_names_that_are_asked_for_with_a_default():
    assert hasattr(CandidateGenerator, "requires_model_outputs"), "engine: generators that read the target"
    names = getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())
    assert {"pixel_values", "inputs_embeds"} & set(names), "models: the list of inputs for the prompt moved"


def test_methods_that_decode_plainly():
    methods = set(utils.GENERATION_MODES_MAPPING.values())
    own = {name for name in methods if "/" not in name}
    assert own == {"_sample", "_beam_search", "_assisted_decoding"}, "engine: another way of decoding, see plain.py"
    assert all(name.startswith("transformers-community/") for name in methods - own)


def called_with(**options: Any) -> dict[str, Any]:
    """What a callable for `custom_generate=` receives."""
    found: dict[str, Any] = {}

    def take(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        found.update(processors=list(logits_processor), config=generation_config, **kwargs)
        return input_ids

    tiny().generate(**prompts(4) | options, custom_generate=take)
    return found


def test_defaults_of_assisted_decoding():
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    filled = [getattr(called_with(max_new_tokens=5)["config"], name) for name in names]
    assert filled == [20, "constant", 0.4], "drafting: other defaults, which mean unset in a callable"
    unset = [getattr(GenerationConfig(), name) for name in names]
    assert unset == [None] * 3, "pairs: a config of the user says numbers that the user did not"


def test_notes_on_a_cache_and_a_mask():
    cache = called_with(max_new_tokens=5)[CACHE]
    assert not getattr(cache, "_is_user_defined", False), "engine: a cache that was made passes for the user's"
    again = called_with(max_new_tokens=5, **{CACHE: cache})
    assert again[CACHE]._is_user_defined, "engine: the user's cache passes for one that was made"
    found = called_with(attention_mask=torch.ones(4, 11), max_new_tokens=5)
    mask = found["attention_mask"]
    noted = getattr(found["config"], "_mask_length", None) if mask is None else mask.shape[1]
    assert noted == 11, "models: where a mask without pads is dropped, _mask_length has its length"


def subclasses(module: Any, base: type) -> set[str]:
    found = {n for n, x in vars(module).items() if inspect.isclass(x) and issubclass(x, base) and x is not base}
    return {name for name in found if getattr(module, name).__module__ == module.__name__}


def test_every_processor_and_criterion_is_known():
    of_transformers = {x for x in WARPERS | STATELESS | RARE_PROCESSORS.keys() if x is not LikeliestToken}
    ours = {x.__name__ for x in of_transformers} | OTHERS | {*OF_ONE_MODEL.split()}
    new = subclasses(logits_process, logits_process.LogitsProcessor) ^ ours
    assert not new, f"sampling: classify {new} by its code, here or in sampling.processors"
    found = subclasses(stopping_criteria, stopping_criteria.StoppingCriteria)
    assert found == CRITERIA, f"sampling: classify {found ^ CRITERIA}"


def texts() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for length in (11, 12, 15, 19):
        yield torch.randint(1, VOCAB_SIZE, (4, length), generator=generator)


@pytest.mark.parametrize("kind", ["warper", "stateless"])
def test_what_a_processor_depends_on(kind: str):
    """A warper reads no text, and one that is stateless says the same again, rows of other texts in between."""
    scores = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    options = {"do_sample": True, "eos_token_id": [2, 3], "max_new_tokens": 9}
    types, seen = WARPERS if kind == "warper" else STATELESS, set()
    for processor in called_with(**BUILT, **options)["processors"]:
        name = f"sampling: {type(processor).__name__}"
        if type(processor) not in types:
            continue
        seen.add(type(processor))
        once, again = ([processor(ids, scores.clone()) for ids in texts()] for _ in range(2))
        assert all(map(torch.equal, once, again)), f"{name} remembers its calls"
        assert kind == "stateless" or all(torch.equal(found, once[0]) for found in once), f"{name} reads the text"
        other = next(texts()).flip(-1)
        for row in range(4):
            mixed = other.clone()
            mixed[row] = next(texts())[row]
            assert torch.equal(processor(mixed, scores.clone())[row], once[0][row]), f"{name} mixes rows"
    assert len(types - seen) <= 1, "sampling: generate builds others"  # Whisper's time stamps need its config
