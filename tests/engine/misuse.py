"""Calls that are refused, as (a telling word of the message, what is done)."""

import copy
import string
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import zoo
from tiny import prompts, tiny
from tokenizers import Tokenizer, decoders, models
from transformers import (
    DynamicCache,
    GenerationMixin,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    TextStreamer,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specx import DraftTargetPair, EarlyExitDraft, SpeculativeDecoding, SuffixDraft, generate
from hf_specx.engine import call as calls
from hf_specx.models import compiled, compiled_forwards
from hf_specx.models.slots import CACHE
from hf_specx.pairs.complete import complete
from hf_specx.pairs.results_file import check_results_path


IDS = prompts(2, width=6)["input_ids"]
ONES = torch.ones(2, 3, dtype=torch.int64)
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def letters(tokens: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single letters, ids in their order."""
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


OTHER = {"tokenizer": letters("abcdefg"), "draft_tokenizer": letters("gfe")}


class Reader(CandidateGenerator):
    requires_model_outputs = True


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "target": tiny,
    "draft": lambda: tiny(seed=1),
    "narrow": lambda: tiny(hidden_size=16, head_dim=4),
    "other vocabulary": lambda: tiny(vocab_size=50),
    "no head": lambda: tiny().model,
    "empty": lambda: empty(),
    "sliding": lambda: tiny("mistral"),
    "learned": lambda: tiny("gpt2"),
    "unknown": lambda: called("never_heard_of"),
    "recurrent": lambda: zoo.build("causal", "mamba2"),
    "encoder": lambda: zoo.build("seq2seq", "t5"),
    "other encoder": lambda: zoo.build("seq2seq", "t5", seed=1),
    "whisper": lambda: whisper(),
}


@cache
def get(name: str) -> PreTrainedModel:
    return MODELS[name]()


def empty() -> PreTrainedModel:
    with torch.device("meta"):
        return tiny()


def called(model_type: str) -> PreTrainedModel:
    model = tiny()
    model.config.model_type = model_type
    return model


def whisper() -> PreTrainedModel:
    sizes = dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads", "encoder_layers"], 2)
    sizes |= {"vocab_size": 48, "d_model": 32, "decoder_layers": 1, "max_source_positions": 8, "num_mel_bins": 8}
    special = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "pad_token_id": 0}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes | special)).eval()


def strategy(draft: Any = "draft", **options) -> SpeculativeDecoding:
    draft = get(draft) if isinstance(draft, str) else draft
    return SpeculativeDecoding(draft, **{"num_draft_tokens": 2} | options)


def call(options: dict | None = None, target: str = "target", draft: Any = "draft", **settings):
    arguments = prompts(2, width=6) | {"max_new_tokens": 2, "do_sample": False} | settings
    arguments = {name: value for name, value in arguments.items() if value is not ...}
    return GenerationMixin.generate(get(target), **arguments, custom_generate=strategy(draft, **options or {}))


def function(target: str = "target", **settings):
    arguments = prompts(2, width=6) | {"max_new_tokens": 2, "do_sample": False, "num_draft_tokens": 2}
    arguments |= {"draft_model": get("draft")} | settings
    return generate(**{name: value for name, value in arguments.items() if value is not ...}, model=get(target))


def pair(tokenizer: Any = None) -> DraftTargetPair:
    return DraftTargetPair(get("target"), get("draft"), tokenizer)


def masked(change: Callable[[torch.Tensor], object], **settings):
    mask = torch.ones(2, 6, dtype=torch.int64)
    changed = change(mask)
    return call(attention_mask=changed if isinstance(changed, torch.Tensor) else mask, **settings)


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


def spread(**settings):
    """As one of two ranks."""
    with patch.object(calls, "world_size", return_value=2):
        return function(synced_gpus=True, **settings)


def to_compile(options: dict | None = None, **settings):
    """With compile=True, where what gets as far as the compiler fails."""
    with (
        patch.object(compiled_forwards, "lookup_backend", side_effect=NotImplementedError),
        patch.object(compiled, "has_compiler", return_value=True),
    ):
        return call({"compile": True} | (options or {}), **settings)


def later() -> dict[str, torch.Tensor]:
    ids = torch.ones(2, 16, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.cat([prompts(2, width=6)["attention_mask"], ids[:, 6:]], 1)}


def directly(input_ids: torch.Tensor):
    """What `generate` would call, which fills up an empty prompt itself."""
    config = copy.deepcopy(get("target").generation_config)
    config.max_length = 5
    return strategy()(get("target"), input_ids, [], [], config)


@torch.no_grad()
def only_encoded():
    encoder = get("encoder").get_encoder()
    inputs = {"encoder_outputs": encoder(input_ids=ONES), "input_ids": ..., "attention_mask": ...}
    return call(target="encoder", draft="other encoder", **inputs)


NONE = {"draft_tokenizer": letters("xyz"), "tokenizer_match": "tokens"}  # that OTHER has too
MORE = {"draft_tokenizer": letters(string.ascii_letters)}
LETTERS = string.ascii_letters[:48]
ALL = letters(LETTERS)
RENAMED = {"tokenizer": ALL, "draft_tokenizer": letters("!" + LETTERS[1:])}
LOCKSTEP = {"verification": "token", "layout": "lockstep"}


def continued(cache, options=None, target="target", **settings):
    return call(options, target, **{CACHE: copy.deepcopy(cache())}, **settings)


WRONG_TEXT = [
    # What a strategy is made of
    ("compile=False", partial(to_compile, {"layout": "padded"})),
    # The models
    ("meta device", partial(call, draft="empty")),
    ("encoder-decoder", partial(call, draft="encoder")),
    ("input_features", partial(call, target="encoder", draft="whisper")),
    ("draft 50", partial(call, draft="other vocabulary")),
    ("'!'", partial(call, RENAMED, draft=EarlyExitDraft(1))),
    ("0%", partial(call, OTHER | NONE)),
    ("one row at a time", partial(call, OTHER, draft="recurrent")),
    ("'W' has id 48", partial(call, OTHER | MORE)),
    ("never_heard_of", partial(call, {"layout": "packed"}, target="unknown")),
    # What a call asks for
    ("contrastive", partial(call, top_k=4, penalty_alpha=0.6)),
    ("keys of all", lambda: continued(full_window, {"layout": "ragged"}, "sliding", **later())),
    ("2 tokens", partial(continued, two_tokens, {"layout": "packed"})),
    ("inputs_embeds", partial(call, {"layout": "packed"}, **embeds())),
    ("token_type_ids", partial(call, {"layout": "packed"}, "learned", token_type_ids=0 * IDS)),
    # Its text
    ("token id 48", partial(call, input_ids=IDS.clamp(min=48))),
    ("width 16", partial(call, **embeds(width=16))),
    ("encoder of its own", only_encoded),
    ("position", partial(call, position_ids=torch.ones(2, 5))),
    # What ties rows together
    ("lockstep", partial(call, LOCKSTEP, seeds=[1, 2], do_sample=True, top_k=0)),
    ("heuristic", partial(spread, num_draft_tokens="auto", num_assistant_tokens_schedule="heuristic")),
]


lookup = partial(function, draft_model=..., num_draft_tokens=...)


# values of the wrong type, out of range or of no known choice, one for each check
PLAIN = [
    # What a strategy is made of
    ("None", lambda: SpeculativeDecoding(None)),
    ("class LlamaForCausalLM", lambda: SpeculativeDecoding(LlamaForCausalLM)),
    ("LlamaModel", lambda: strategy("no head")),
    ("Reader", lambda: SpeculativeDecoding(Reader())),
    ("num_drafts", partial(strategy, num_drafts=5)),
    ("num_draft_tokens=-1", partial(strategy, num_draft_tokens=-1)),
    ("is a processor; pass its .tokenizer", partial(strategy, tokenizer=SimpleNamespace(tokenizer=ALL))),
    ("tree=0 is no number of nodes; give an int from 1 to 64", partial(strategy, tree=0)),
    ("tree=True is no number of nodes", partial(strategy, tree=True)),
    ("tree='wide' is no number of nodes", partial(strategy, tree="wide")),
    ("tree= is an option of the strategy", lambda: call(tree=8)),
    ("typical", partial(strategy, verification="typical")),
    ("num_assistant_tokens=-1", partial(function, num_assistant_tokens=-1, num_draft_tokens=...)),
    ("threshold=1.5", partial(function, assistant_confidence_threshold=1.5)),
    ("linear", partial(function, num_assistant_tokens_schedule="linear", num_draft_tokens=...)),
    # What a call asks for
    ("prefill_chunk_size=0", partial(call, prefill_chunk_size=0)),
    ("TextStreamer", lambda: call({"streamer": TextStreamer(tokenizer=None)})),
    ("assistant_model=", lambda: call(assistant_model=get("draft"))),
    ("tokenizer", partial(call, stop_strings="x")),
    ("streamer each", lambda: call({"streamer": TextStreamer(ALL)}, streamer=TextStreamer(ALL))),
    ("several drafts", lambda: spread(draft_model=[SuffixDraft(), get("draft")])),
    # Its text
    ("no batch", partial(call, input_ids=IDS[..., None], attention_mask=...)),
    ("float32", partial(call, input_ids=IDS.float())),
    ("empty", lambda: directly(IDS[:, :0])),
    ("2D mask", partial(masked, lambda mask: mask[:, None] * 0, **embeds())),
    # What ties rows together
    ("seeds=7", partial(call, seeds=7)),
    ("2 seeds for 4 rows", partial(call, seeds=[1, 2], num_return_sequences=2, do_sample=True, top_k=0)),
    ("seed -1", partial(call, seeds=[1, -1])),
    # The function, and pairs
    ("no draft", partial(function, draft_model=...)),
    ("lookup_num_tokens=2.5", partial(lookup, prompt_lookup_num_tokens=2.5)),
    ("ngram_size=3", partial(lookup, max_matching_ngram_size=3)),
    ("ngram_size=-1", partial(lookup, max_matching_ngram_size=-1, prompt_lookup_num_tokens=4)),
    ("option of the strategy", lambda: call(num_draft_tokens=3)),
    ("mean the same", lambda: function(assistant_model=get("narrow"))),
    ("Path", partial(function, custom_generate=Path("here"))),
    ("num_draft_token", partial(function, num_draft_token=3)),
    ("token_healing", partial(function, token_healing=True)),
    ("a ProcessorMixin; pass its .tokenizer, and itself as processor=", lambda: pair(object.__new__(ProcessorMixin))),
    # Results in files
    ("no tokenizer", lambda: complete(pair(), ["a"])),
    ("there already", lambda: check_results_path(Path(__file__))),
    ("device", lambda: check_results_path(Path("/dev/null"))),
]
