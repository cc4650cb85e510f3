"""Values of the wrong type, out of range or of no known choice: [(a part of what is said, what is done)]."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from misuse import (
    IDS,
    ONES,
    Closing,
    Counting,
    Reader,
    Tokens,
    call,
    call_of_1,
    directly,
    embeds,
    function,
    get,
    made,
    masked,
    negative,
    of_one_text,
    of_pair,
    spread,
    strategy,
)
from tiny import prompts
from transformers import LlamaForCausalLM, TextStreamer

from hf_specx import DraftTargetPair, SpeculativeDecoding, SuffixDraft, generate
from hf_specx.engine.check_inputs import check_noise
from hf_specx.engine.entry import check_arguments


SAMPLED = {"do_sample": True, "top_k": 0}


def of_a_class():
    return get("target").generate(**prompts(2), max_new_tokens=2, custom_generate=SpeculativeDecoding)


def on_meta():
    inputs = {name: tensor.to("meta") for name, tensor in prompts(2).items()}
    return generate(**inputs, model=get("target"), max_new_tokens=2, draft_model=get("draft"))


PLAIN = [
    # What a strategy is made of
    ("draft_model='org/draft' is a name; load it first", lambda: SpeculativeDecoding("org/draft")),
    ("draft_model is None; give a model, .* as SuffixDraft()", lambda: SpeculativeDecoding(None)),
    ("draft_model is a dict; give a model", lambda: SpeculativeDecoding({})),
    ("SimpleNamespace.*inherit from hf_specx.Drafter", lambda: SpeculativeDecoding(SimpleNamespace(propose=print))),
    ("draft_model is the class LlamaForCausalLM; give an obj", lambda: SpeculativeDecoding(LlamaForCausalLM)),
    ("give it an object: custom_generate=SpeculativeDecoding.draft_model.", of_a_class),
    ("input_ids is on the meta device, which has shapes", on_meta),
    ("inputs is on the meta device", lambda: of_pair(inputs=IDS.to("meta"), input_ids=None)),
    ("LlamaModel, which scores no next token", lambda: strategy("no head")),
    ("AssistedCandidateGenerator, made for one text; give its", of_one_text),
    ("Reader, which reads the target's", lambda: SpeculativeDecoding(Reader())),
    (
        "unknown option 'num_drafts'; did you mean 'num_draft_tokens'. known: num_draft_tokens, ",
        partial(made, num_drafts=5),
    ),
    ("num_draft_tokens='many' is not a number", partial(made, num_draft_tokens="many")),
    ("num_draft_tokens=0 is below 1; give 1", partial(made, num_draft_tokens=0)),
    ("verification='typical' is unknown; choose", partial(made, verification="typical")),
    ("layout='diagonal' is unknown; choose one of auto, rag", partial(made, layout="diagonal")),
    ("stream_by='word' is unknown; choose one of token", partial(made, stream_by="word")),
    ("compile='max' is not a bool; use True", partial(made, compile="max")),
    ("streamer is an int without put and end; pass a", partial(made, streamer=3)),
    ("^tokenizer is a str without get_vocab; pass", partial(made, tokenizer="x")),
    ("costs is a dict without table and best.*strategy.costs", partial(made, costs={})),
    (
        "num_assistant_tokens=-1 is not an int of 1 or more; give one",
        partial(function, num_assistant_tokens=-1, num_draft_tokens=...),
    ),
    (
        "num_assistant_tokens_schedule='random' is unknown; choose one of constant",
        partial(function, num_assistant_tokens_schedule="random"),
    ),
    (
        "assistant_confidence_threshold=1.5 is no probability; give a number",
        partial(function, assistant_confidence_threshold=1.5),
    ),
    # The models
    ("model is a str; give", lambda: DraftTargetPair("org/target", get("draft"))),
    ("model is a LlamaModel, which scores no next", partial(function, target="no head")),
    # What a call asks for
    ("device type 'mps' does not have; use do_sample=False", lambda: check_noise(torch.device("mps"), "block")),
    ("use_cache=False cannot be honoured.*use_cache=True", partial(call, use_cache=False)),
    ("cache_implementation='static' cannot be", partial(call, cache_implementation="static")),
    (
        "a TextStreamer takes one row, and the batch has 2; use hf_specx.BatchStreamer",
        lambda: call({"streamer": TextStreamer(tokenizer=None)}),
    ),
    ("pass streamer= on.*use Spec", lambda: call_of_1(streamer=Closing())),
    ("pass assistant_model= on.*leave", lambda: call_of_1(assistant_model=get("draft"))),
    (
        "synced_gpus=True needs the same forwards on every rank, and several drafts are chosen by the text; give one",
        lambda: spread(draft_model=[SuffixDraft(), get("draft")]),
    ),
    ("pass synced_gpus= on.*use hf_specx.generate", lambda: call_of_1(synced_gpus=True)),
    ("pass tokenizer= on.*use Spec", lambda: call_of_1(tokenizer=Tokens(48))),
    ("pass assistant_tok.*use", lambda: call_of_1(assistant_tokenizer=Tokens(48))),
    # Its text
    ("of shape .2, 6, 1. is no batch.*; pass", partial(call, input_ids=IDS[..., None], attention_mask=...)),
    ("input_ids has dtype torch.float32; pass int", partial(call, input_ids=IDS.float())),
    ("the prompt is empty.*pass at least one token", lambda: directly(IDS[:, :0])),
    (
        "attention_mask of shape .2, 1, 6. is no 2D mask .*; pass",
        partial(masked, lambda mask: mask[:, None] * 0, **embeds()),
    ),
    # What ties rows together
    ("seeds=7 is not a list of ints; give one", partial(call, seeds=7)),
    ("2 seeds for 4 rows", partial(call, seeds=[1, 2], num_return_sequences=2, **SAMPLED)),
    ("the seed -1 is outside of what torch takes; give ints from 0", partial(call, seeds=[1, -1])),
    ("has 3 rows and the batch 2.*give one", lambda: negative(ONES.T)),
    ("mask of shape .2, 2. does not fit .*; pass", lambda: negative(ONES, ONES[:, 1:])),
    # The function
    ("there is no draft: pass draft_model= or assistant_model=", partial(function, draft_model=...)),
    ("custom_generate= has no .*; use", lambda: of_pair(custom_generate="org/x")),
    ("assistant_model= mean the same; pass", lambda: function(assistant_model=get("narrow"))),
    ("transformers ignores; pass it as a str", partial(function, custom_generate=Path("here"))),
    ("is a dict; pass", lambda: function(inputs={}, input_ids=..., attention_mask=...)),
    ("generation_config is a dict; pass", partial(function, generation_config={})),
    ("is a Counting; pass a list", lambda: function(logits_processor=Counting())),
    (
        "cache_implementation='paged' turns.*leave it out",
        lambda: check_arguments(None, get("target"), {"cache_implementation": "paged"}, ()),
    ),
    ("'num_draft_token'; did you mean 'num_draft_tokens'", partial(function, num_draft_token=3)),
    ("strings=5 is no str", lambda: function(stop_strings=5, tokenizer=Tokens(48))),
    ("needs the tokenizer; pass tok", partial(function, stop_strings=["x"])),
    ("token_healing=True needs.*pass", partial(function, token_healing=True)),
]
