"""Bad input and misuse, put into practice: models of all kinds, and calls with them that should be refused."""

import copy
from collections.abc import Callable
from functools import cache
from unittest.mock import patch

import torch
import zoo
from tiny import prompts, tiny
from tokenizers import Tokenizer, decoders, models
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specx import DraftTargetPair, EarlyExitDraft, SpeculativeDecoding, SuffixDraft, generate
from hf_specx.engine import call as calls
from hf_specx.engine import check_inputs
from hf_specx.models import compiled, regions
from hf_specx.models.slots import CACHE


IDS = prompts(2, width=6)["input_ids"]
ONES = torch.ones(2, 3, dtype=torch.int64)
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def letters(tokens: str, decoder: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer of single letters, ids in their order; `decoder` says what they stand for."""
    vocab = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.ByteLevel() if decoder else None
    return PreTrainedTokenizerFast(tokenizer_object=made)


OTHER = {"tokenizer": letters("abcdefg"), "draft_tokenizer": letters("gfe")}


class Reader(CandidateGenerator):
    requires_model_outputs = True


def checkpointing() -> PreTrainedModel:
    """A model that trains with gradient checkpointing."""
    model = tiny().train()
    model.gradient_checkpointing_enable()
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "target": tiny,
    "draft": lambda: tiny(seed=1),
    "narrow": lambda: tiny(hidden_size=16, head_dim=4),
    "other vocabulary": lambda: tiny(vocab_size=50),
    "training": lambda: tiny(attention_dropout=0.1).train(),
    "checkpointing": lambda: checkpointing(),
    "no head": lambda: tiny().model,
    "empty": lambda: on_meta(),
    "both ways": lambda: BertLMHeadModel(BertConfig(**SMALL)).eval(),
    "sliding": lambda: tiny("mistral"),
    "unknown": lambda: called("never_heard_of"),
    "doge": lambda: called("doge"),
    "recurrent": lambda: zoo.build("causal", "mamba2"),
    "own cache": lambda: called("rwkv"),
    "by mask": lambda: called("moshi", "flash_attention_2"),
    "led": lambda: zoo.build("seq2seq", "led"),
    "no cache": lambda: called("openai-gpt"),
    "encoder": lambda: zoo.build("seq2seq", "t5"),
    "other encoder": lambda: zoo.build("seq2seq", "t5", seed=1),
    "whisper": lambda: whisper(8),
    "more bins": lambda: whisper(16),
    "wide whisper": lambda: WhisperForCausalLM(whisper(8, d_model=48).config).eval(),
}


@cache
def get(name: str) -> PreTrainedModel:
    return MODELS[name]()


def on_meta() -> PreTrainedModel:
    with torch.device("meta"):
        return tiny()


def called(model_type: str, attention: str = "sdpa") -> PreTrainedModel:
    model = tiny()
    model.config.model_type, model.config._attn_implementation = model_type, attention
    return model


def whisper(bins: int, **changes) -> PreTrainedModel:
    sizes = dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads", "encoder_layers"], 2)
    sizes |= {"vocab_size": 48, "d_model": 32, "decoder_layers": 1, "max_source_positions": 8, "pad_token_id": 0}
    special = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    return WhisperForConditionalGeneration(WhisperConfig(num_mel_bins=bins, **sizes | special | changes)).eval()


def strategy(draft: str = "draft", **options) -> SpeculativeDecoding:
    return SpeculativeDecoding(get(draft), **{"num_draft_tokens": 2} | options)


def call(options: dict | None = None, target: str = "target", draft: str = "draft", **settings):
    """Two rows through the strategy."""
    given = prompts(2, width=6) | {"max_new_tokens": 2, "do_sample": False} | settings
    given = {name: value for name, value in given.items() if value is not ...}
    return GenerationMixin.generate(get(target), **given, custom_generate=strategy(draft, **options or {}))


def early(**options):
    """With the target's first layer as the draft."""
    strategy = SpeculativeDecoding(EarlyExitDraft(1), num_draft_tokens=2, **options)
    return get("target").generate(**prompts(2, width=6), max_new_tokens=2, do_sample=False, custom_generate=strategy)


def function(target: str = "target", **settings):
    """Two rows through the function."""
    given = prompts(2, width=6) | {"max_new_tokens": 2, "do_sample": False, "num_draft_tokens": 2}
    given |= {"draft_model": get("draft")} | settings
    return generate(**{name: value for name, value in given.items() if value is not ...}, model=get(target))


def pair() -> DraftTargetPair:
    return DraftTargetPair(get("target"), get("draft"))


def of_pair(**settings):
    """Two rows through a pair."""
    given = prompts(2, width=6) | {"max_new_tokens": 2, "do_sample": False, "num_draft_tokens": 2}
    return pair().generate(**given | settings)


def masked(change: Callable[[torch.Tensor], object], **settings):
    """A call with a changed mask of ones, [2, 6]."""
    mask = torch.ones(2, 6, dtype=torch.int64)
    changed = change(mask)
    return call(attention_mask=changed if isinstance(changed, torch.Tensor) else mask, **settings)


def put(row, column, value: float = 0) -> Callable[[torch.Tensor], None]:
    return lambda mask: mask.__setitem__((row, column), value)


def embeds(target: str = "target", width: int = 32) -> dict:
    return {"input_ids": ..., "inputs_embeds": torch.zeros(2, 6, width), "target": target}


@cache
def full_window() -> DynamicCache:
    """Of a text that is longer than the window, so that its first keys are gone."""
    past = DynamicCache(config=get("sliding").config)
    get("sliding").generate(**prompts(2, width=6), max_new_tokens=9, **{CACHE: past})
    return past


@cache
@torch.no_grad()
def two_tokens() -> DynamicCache:
    past = DynamicCache(config=get("target").config)
    get("target")(input_ids=torch.ones(2, 2, dtype=torch.int64), **{CACHE: past})
    return past


def negative(ids: torch.Tensor, mask: torch.Tensor | None = None, **settings):
    guidance = {"guidance_scale": 1.5, "negative_prompt_ids": ids, "negative_prompt_attention_mask": mask}
    return call(**guidance, **settings)


def spread(**settings):
    """As one of two ranks."""
    with patch.object(calls, "world_size", return_value=2):
        return function(synced_gpus=True, **settings)


def to_compile(options: dict | None = None, found: bool = True, **settings):
    """With compile=True, where what gets as far as the compiler fails."""
    with (
        patch.object(regions, "lookup_backend", side_effect=NotImplementedError),
        patch.object(compiled, "has_compiler", return_value=found),
    ):
        return call({"compile": True} | (options or {}), **settings)


def without_a_model_elsewhere():
    """Sampling by default, "coupled" there, as if this device had other noise."""
    given = {"do_sample": True, "custom_generate": SpeculativeDecoding(SuffixDraft(), num_draft_tokens=2)}
    with patch.object(check_inputs, "NOISE_DEVICES", ()):
        return get("target").generate(**prompts(2, width=6), max_new_tokens=2, **given)


def later() -> dict[str, torch.Tensor]:
    """The text of `full_window` and one token more."""
    ids = torch.ones(2, 16, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.cat([prompts(2, width=6)["attention_mask"], ids[:, 6:]], 1)}


def call_of_1(**settings):
    return get("target").generate(**prompts(1), **settings, max_new_tokens=2, custom_generate=strategy())


def directly(input_ids: torch.Tensor):
    """What `generate` would call, which fills up an empty prompt itself."""
    config = copy.deepcopy(get("target").generation_config)
    config.max_length = 5
    return strategy()(get("target"), input_ids, [], [], config)


@torch.no_grad()
def only_encoded():
    encoder = get("encoder").get_encoder()
    given = {"encoder_outputs": encoder(input_ids=ONES), "input_ids": ..., "attention_mask": ...}
    return call(target="encoder", draft="other encoder", **given)


def holed_decoder():
    text = {"decoder_input_ids": ONES, "decoder_attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}
    return call(target="led", draft="led", **text)
