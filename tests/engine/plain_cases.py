"""Values of the wrong type, out of range or of no known choice, one for each check: [(what is said, what is done)]."""

from functools import partial
from pathlib import Path

import torch
from misuse import (
    IDS,
    ONES,
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
    of_pair,
    pair,
    spread,
    strategy,
)
from tiny import prompts
from transformers import LlamaForCausalLM, TextStreamer

from hf_specx import SpeculativeDecoding, SuffixDraft, generate
from hf_specx.engine.check_inputs import check_noise
from hf_specx.pairs.complete import complete
from hf_specx.pairs.results_file import check_results_path


def of_a_class():
    return get("target").generate(**prompts(2), max_new_tokens=2, custom_generate=SpeculativeDecoding)


def on_meta():
    inputs = {name: tensor.to("meta") for name, tensor in prompts(2).items()}
    return generate(**inputs, model=get("target"), max_new_tokens=2, draft_model=get("draft"))


PLAIN = [
    # What a strategy is made of
    ("draft_model is None; give a model, .* as SuffixDraft()", lambda: SpeculativeDecoding(None)),
    ("draft_model is the class LlamaForCausalLM; give an obj", lambda: SpeculativeDecoding(LlamaForCausalLM)),
    ("give it an object: custom_generate=SpeculativeDecoding.draft_model.", of_a_class),
    ("input_ids is on the meta device, which has shapes", on_meta),
    ("LlamaModel, which scores no next token", lambda: strategy("no head")),
    ("Reader, which reads the target's", lambda: SpeculativeDecoding(Reader())),
    ("'num_drafts'; did you mean 'num_draft_tokens'. known: num_draft_tokens, ", partial(made, num_drafts=5)),
    ("num_draft_tokens=0 is below 1; give 1", partial(made, num_draft_tokens=0)),
    ("verification='typical' is unknown; choose", partial(made, verification="typical")),
    ("compile='max' is not a bool; use True", partial(made, compile="max")),
    ("streamer is an int without put and end; pass a", partial(made, streamer=3)),
    ("tokens=-1 is not an int of 1 or", partial(function, num_assistant_tokens=-1, num_draft_tokens=...)),
    ("threshold=1.5 is no probability; give a number", partial(function, assistant_confidence_threshold=1.5)),
    # What a call asks for
    ("device type 'mps' does not have; use do_sample=False", lambda: check_noise(torch.device("mps"), "block")),
    ("use_cache=False cannot be honoured.*use_cache=True", partial(call, use_cache=False)),
    ("cache_implementation='static' cannot be", partial(call, cache_implementation="static")),
    ("a TextStreamer takes one row, and", lambda: call({"streamer": TextStreamer(tokenizer=None)})),
    ("pass assistant_model= on.*leave", lambda: call_of_1(assistant_model=get("draft"))),
    ("pass tokenizer= on.*use Spec", lambda: call_of_1(tokenizer=Tokens(48))),
    ("several drafts are chosen by the text; give one", lambda: spread(draft_model=[SuffixDraft(), get("draft")])),
    # Its text
    ("of shape .2, 6, 1. is no batch.*; pass", partial(call, input_ids=IDS[..., None], attention_mask=...)),
    ("input_ids has dtype torch.float32; pass int", partial(call, input_ids=IDS.float())),
    ("the prompt is empty.*pass at least one token", lambda: directly(IDS[:, :0])),
    ("of shape .2, 1, 6. is no 2D mask .*; pass", partial(masked, lambda mask: mask[:, None] * 0, **embeds())),
    # What ties rows together
    ("seeds=7 is not a list of ints; give one", partial(call, seeds=7)),
    ("2 seeds for 4 rows", partial(call, seeds=[1, 2], num_return_sequences=2, do_sample=True, top_k=0)),
    ("the seed -1 is outside of what torch takes; give ints", partial(call, seeds=[1, -1])),
    ("has 3 rows and the batch 2.*give one", lambda: negative(ONES.T)),
    # The function, and pairs
    ("there is no draft: pass draft_model= or assistant_model=", partial(function, draft_model=...)),
    ("custom_generate= has no .*; use", lambda: of_pair(custom_generate="org/x")),
    ("assistant_model= mean the same; pass", lambda: function(assistant_model=get("narrow"))),
    ("transformers ignores; pass it as a str", partial(function, custom_generate=Path("here"))),
    ("generation_config is a dict; pass", partial(function, generation_config={})),
    ("'num_draft_token'; did you mean 'num_draft_tokens'", partial(function, num_draft_token=3)),
    ("needs the tokenizer; pass tok", partial(function, stop_strings=["x"])),
    ("token_healing=True needs.*pass", partial(function, token_healing=True)),
    # Results in files
    ("the pair has no tokenizer to read texts with", lambda: complete(pair(), ["a"])),
    ("out='.*/plain_cases.py' is there already, and .*; name another", lambda: check_results_path(Path(__file__))),
    ("out='/dev/null' is a device; name a file", lambda: check_results_path(Path("/dev/null"))),
]
