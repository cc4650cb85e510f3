"""The host's contract, as in test_host_contract.py: processors and stopping criteria.

`KINDS` says of each processor of the host how it depends on the text. One that is not there has to be classified:
by its code, then in hf_specx.sampling.processors and here.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import VOCAB_SIZE, prompts, tiny
from transformers import GenerationMixin, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.stopping_criteria import StoppingCriteria

from hf_specx.models.slots import CACHE
from hf_specx.sampling import processors


KINDS = {
    "warper": """
        TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper TopHLogitsWarper MinPLogitsWarper TypicalLogitsWarper
        EpsilonLogitsWarper EtaLogitsWarper LogitNormalization InfNanRemoveLogitsProcessor
        SuppressTokensLogitsProcessor
    """,
    "stateless": """
        RepetitionPenaltyLogitsProcessor EncoderRepetitionPenaltyLogitsProcessor NoRepeatNGramLogitsProcessor
        EncoderNoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor NoBadWordsLogitsProcessor
        MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor ForcedBOSTokenLogitsProcessor
        ForcedEOSTokenLogitsProcessor ExponentialDecayLengthPenalty SuppressTokensAtBeginLogitsProcessor
        WatermarkLogitsProcessor WhisperTimeStampLogitsProcessor
    """,
    "masks": "PrefixConstrainedLogitsProcessor",
    "guidance": "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "stateful": "SynthIDTextWatermarkLogitsProcessor",
    # put there by generate methods of single models, with meanings of their own
    "of one model": """
        WhisperNoSpeechDetection ClassifierFreeGuidanceLogitsProcessor AlternatingCodebooksLogitsProcessor
        BarkEosPrioritizerLogitsProcessor DiaClassifierFreeGuidanceLogitsProcessor DiaEOSChannelFilterLogitsProcessor
        DiaEOSDelayPatternLogitsProcessor
    """,
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
CRITERIA = {"MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria", "ConfidenceCriteria"}
BUILT = {
    "sequence_bias": {(3,): 1.0, (4, 5): 2.0},
    "encoder_repetition_penalty": 1.2,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[7], [8, 9]],
    "min_length": 13,
    "min_new_tokens": 2,
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 6,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (3, 1.1),
    "suppress_tokens": [10],
    "begin_suppress_tokens": [11],
    "temperature": 0.7,
    "top_h": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "typical_p": 0.98,
    "epsilon_cutoff": 0.001,
    "eta_cutoff": 0.001,
    "watermarking_config": WatermarkingConfig(),
    "renormalize_logits": True,
}
ORDER = """
    UnbatchedClassifierFreeGuidance SequenceBias EncoderRepetitionPenalty RepetitionPenalty NoRepeatNGram
    EncoderNoRepeatNGram NoBadWords MinLength MinNewTokensLength PrefixConstrained ForcedBOSToken ForcedEOSToken
    InfNanRemove ExponentialDecayLengthPenalty SuppressTokens SuppressTokensAtBegin Mine Temperature TopH TopK TopP
    MinP Typical Epsilon Eta Watermark LogitNormalization
"""


def subclasses(module: Any, base: type) -> set[str]:
    found = {n for n, x in vars(module).items() if inspect.isclass(x) and issubclass(x, base) and x is not base}
    return {name for name in found if getattr(module, name).__module__ == module.__name__}


def built_by(method: Any) -> set[str]:
    """Names of what a method calls, by its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    return {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def test_every_processor_is_classified():
    new = subclasses(logits_process, logits_process.LogitsProcessor) ^ KIND_OF.keys()
    assert not new, f"sampling: classify {new}, or take them out"
    listed = {kind: {name for name in KIND_OF if KIND_OF[name] == kind} for kind in KINDS}
    message = "sampling: its lists are not those of this table"
    assert {x.__name__ for x in processors.WARPERS} == listed["warper"], message
    assert {x.__name__ for x in processors.STATELESS} == listed["stateless"], message


def test_what_generate_builds_is_known():
    built = built_by(GenerationMixin._get_logits_processor)
    found = {name for name in built if name.endswith(("Processor", "Warper", "Penalty", "Normalization"))}
    assert found <= KIND_OF.keys(), f"sampling: generate builds {found - KIND_OF.keys()}; classify them"
    assert "of one model" not in {KIND_OF[name] for name in found}, "sampling: classify those of one model"
    for config in (WatermarkingConfig(), SynthIDTextWatermarkingConfig(keys=[1], ngram_len=2)):
        name = type(config.construct_processor(VOCAB_SIZE, "cpu")).__name__
        assert KIND_OF[name] in ("stateless", "stateful"), f"sampling: {name}"


class Mine(logits_process.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.fixture
def prepared() -> list[logits_process.LogitsProcessor]:
    """What `generate` builds where everything is asked for."""
    found: list[Any] = []

    def take(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        found.extend(logits_processor)
        return input_ids

    tiny().generate(
        **prompts(4),
        **BUILT,
        do_sample=True,
        guidance_scale=1.5,
        eos_token_id=[2, 3],
        max_new_tokens=9,
        prefix_allowed_tokens_fn=lambda row, ids: list(range(VOCAB_SIZE)),
        logits_processor=logits_process.LogitsProcessorList([Mine()]),
        custom_generate=take,
    )
    return found


def test_the_order_of_processors(prepared: list[logits_process.LogitsProcessor]):
    names = [type(x).__name__.removesuffix("LogitsProcessor").removesuffix("LogitsWarper") for x in prepared]
    assert " ".join(names) == " ".join(ORDER.split()), "sampling: stock applies its processors in another order"


def texts() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for length in (11, 12, 15, 19):
        yield torch.randint(1, VOCAB_SIZE, (4, length), generator=generator)


def test_what_a_processor_depends_on(prepared: list[logits_process.LogitsProcessor]):
    """A warper reads no text, and one that is stateless says the same again, rows of other texts in between."""
    scores = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    for processor in prepared:
        kind = KIND_OF.get(type(processor).__name__)
        name = f"sampling: {type(processor).__name__}"
        if kind == "warper":
            several = torch.stack([processor(ids, scores.clone()) for ids in texts()])
            assert (several == several[0]).all(), f"{name} reads the text"
            alone = torch.cat([processor(torch.zeros(1, 1, dtype=torch.int64), row[None].clone()) for row in scores])
            assert torch.equal(alone, several[0]), f"{name} mixes rows"
        elif kind == "stateless":
            once, again = ([processor(ids, scores.clone()) for ids in texts()] for _ in range(2))
            assert all(map(torch.equal, once, again)), f"{name} remembers its calls"
            other = next(texts()).flip(-1)
            for row in range(4):
                mixed, ids = other.clone(), next(texts())
                mixed[row] = ids[row]
                assert torch.equal(processor(mixed, scores.clone())[row], once[0][row]), f"{name} mixes rows"


def test_what_keeps_state():
    synth = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3).construct_processor(VOCAB_SIZE, "cpu")
    ids, scores = next(texts()), torch.zeros(4, VOCAB_SIZE)
    assert synth.state is None, "sampling: a new SynthID has a state"
    first = synth(ids, scores)
    assert not torch.equal(first, synth(ids, scores)), "sampling: SynthID keeps no state any more"
    guidance = logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, tiny(), ids, torch.ones_like(ids))
    held = {"input_ids", "attention_mask", "use_cache", CACHE, "first_pass"}
    message = "models: classifier-free guidance keeps its inputs otherwise"
    assert guidance.unconditional_context.keys() == held, message
    assert guidance.guidance_scale == 2.0, message
    assert torch.equal(guidance.unconditional_context["input_ids"], ids), message
    own = guidance.model(ids).logits[:, -1].log_softmax(-1)
    scores = torch.randn(4, VOCAB_SIZE)
    expected = 2.0 * (scores.log_softmax(-1) - own) + own
    assert torch.allclose(guidance(ids, scores), expected, atol=1e-5), "models: it mixes otherwise"


def test_every_criterion_is_known():
    found = subclasses(stopping_criteria, StoppingCriteria)
    assert found == CRITERIA, f"sampling: classify {found ^ CRITERIA}"
    built = built_by(GenerationMixin._get_stopping_criteria) & found
    assert built == CRITERIA, f"sampling: generate builds {built}"
    length, end = stopping_criteria.MaxLengthCriteria(12), stopping_criteria.EosTokenCriteria(3)
    assert length.max_length == 12, "sampling: the attribute of MaxLengthCriteria"
    assert end.eos_token_id.tolist() == [3], "sampling: the attribute of EosTokenCriteria"
    assert length(torch.zeros(2, 12), None).tolist() == [True, True], "sampling: criteria speak of each row"
