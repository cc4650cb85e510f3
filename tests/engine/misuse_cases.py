"""Calls that would give wrong text: {check: (a part of what is said, what is done)}.

What follows a comma tells cases of one check apart. Plain misuse is in `plain_cases`.
"""

import copy
import string
from functools import partial

import torch
from misuse import (
    IDS,
    ONES,
    OTHER,
    Tokens,
    call,
    early,
    embeds,
    full_window,
    get,
    holed_decoder,
    later,
    letters,
    masked,
    negative,
    of_other_files,
    only_encoded,
    put,
    spread,
    to_compile,
    two_tokens,
    without_a_model_elsewhere,
)
from transformers import StaticCache

from hf_specx import generate
from hf_specx.engine.check_inputs import DRAFTS_INSTEAD
from hf_specx.models.slots import CACHE
from hf_specx.pairs.generate import NAMED


SAMPLED = {"do_sample": True, "top_k": 0}
MODES = {"penalty_alpha": 0.6, "prompt_lookup_num_tokens": 3, "force_words_ids": [[1]]}

CASES = {
    # What a strategy is made of
    "compiled_in_another_layout": (
        "goes with layout='ragged', and LlamaForCausalLM would be decoded in 'padded'.*use compile=False",
        partial(to_compile, {"layout": "padded"}),
    ),
    # The models
    "random_in_training": ("the target is in training mode.*target.eval", partial(call, target="training")),
    "trained_without_a_cache": ("with gradient checkpointing.*target.eval", partial(call, target="checkpointing")),
    "weights_not_loaded": ("the draft model has parameters on the meta device", partial(call, draft="empty")),
    "attends_in_both_directions": ("attends in both directions.*set is_decoder", partial(call, target="both ways")),
    "frequencies_that_change": (
        "rope_type='dynamic' changes its frequencies after position 12",
        partial(call, target="long", max_new_tokens=7),
    ),
    "draft_with_an_encoder": (
        "T5ForConditionalGeneration is an encoder-decoder.*choose a decoder-only draft",
        partial(call, draft="encoder"),
    ),
    "draft_that_hears": (
        "reads input_ids and the draft WhisperForConditionalGeneration input_features; choose",
        partial(call, target="encoder", draft="whisper"),
    ),
    "vocabularies_of_other_sizes": ("48 tokens and the draft 50.*pass", partial(call, draft="other vocabulary")),
    "files_of_other_tokens": (
        "have different tokenizers: 48 of 48 ids stand for other tokens, .*; pass tokenizer= and draft_tokenizer=",
        of_other_files,
    ),
    "tokens_of_another_meaning": (
        "the two tokenizers differ, for instance in '0' with id 0; choose a draft with the",
        partial(early, tokenizer=Tokens(48), draft_tokenizer=Tokens(48, "zero")),
    ),
    "too_few_common_tokens": (
        "only 0% of the tokens of a sample text are in both tokenizers.*choose a draft with the target's own",
        partial(call, OTHER | {"draft_tokenizer": letters("xyz"), "tokenizer_match": "tokens"}),
    ),
    "own_text_in_lockstep": (
        "the draft .* has another tokenizer .*one row at a time; choose a draft with attention",
        partial(call, OTHER, draft="recurrent"),
    ),
    "tokenizer_of_another_model": (
        "the draft's tokenizer is not that of LlamaForCausalLM: 'W' has id 48, and the model scores 48 tokens; pass",
        partial(call, OTHER | {"draft_tokenizer": letters(string.ascii_letters)}),
    ),
    "check_lifted": (
        "drops begin_suppress_tokens .*pass the draft as draft_model=",
        lambda: generate(model=get("whisper"), **dict.fromkeys(NAMED) | {"assistant_model": get("draft")}),
    ),
    "type_that_is_not_exact": ("model type 'rwkv' cannot be a target.*choose an", partial(call, target="own cache")),
    "attention_without_layout": ("by position only.*load it with attn_impl", partial(call, target="by mask")),
    "layout_that_is_not_exact": (
        "layout='padded' has not been shown .*'never_heard_of'.*use 'lockstep' or 'auto'",
        partial(call, {"layout": "padded"}, target="unknown"),
    ),
    # What a call asks for
    "beam_search": ("num_beams=3 is beam search, which is not supported; set num_beams=1", partial(call, num_beams=3)),
    **{
        f"other_mode, {name}": (
            f"^{name}=.* selects .*; {'a draft.*Draft' if name in DRAFTS_INSTEAD else 'for greedy'}.* leave it out",
            partial(call, top_k=4, **{name: value}),
        )
        for name, value in MODES.items()
    },
    "static_past": (
        f"{CACHE} is a StaticCache, .*pass a DynamicCache",
        lambda: call(**{CACHE: StaticCache(get("target").config, max_cache_len=40)}),
    ),
    "check_past": (
        "layout='ragged' needs the keys of all tokens.*use layout='auto'",
        lambda: call({"layout": "ragged"}, "sliding", **{CACHE: copy.deepcopy(full_window())}, **later()),
    ),
    "packed_past": (
        f"layout='packed' starts empty, and {CACHE} holds 2 tokens; use layout='ragged'",
        lambda: call({"layout": "packed"}, **{CACHE: copy.deepcopy(two_tokens())}),
    ),
    "noise_that_cannot_be_redrawn": (
        "cannot redraw the noise .* on 'cpu'; use verification='token' or 'block'",
        without_a_model_elsewhere,
    ),
    # Its text
    "unknown_token": ("has the token id 48, and.* 0 to 47; use", partial(call, input_ids=IDS.clamp(min=48))),
    "embeds_of_another_width": ("of width 16 .* the target.* in 32; make", partial(call, **embeds(width=16))),
    "encoded_already": ("the draft T5.* has an encoder of its own; pass what", only_encoded),
    "positions_for_other_tokens": (".2, 5. has no position.*leave", partial(call, position_ids=torch.ones(2, 5))),
    "mask_for_other_tokens": ("has 7 columns, and the text 6", partial(masked, lambda mask: torch.ones(2, 7))),
    "mask_of_other_values": ("has the value -1000.0; pass 1", partial(masked, lambda mask: (mask.tril() - 1) * 1e3)),
    "empty_row": ("the prompt of row 1 is empty .*; pass", partial(masked, put(1, slice(None)))),
    "padding_on_the_right": ("row 1 .* ends in 0.*padding_side='left'", partial(masked, put(1, slice(4, 6)))),
    "holes_in_the_mask": ("decoder_attention_mask has zeros between.*on the left only", holed_decoder),
    "text_that_was_read": (
        "holds 2 tokens, and the whole text has 2; pass the text with",
        lambda: call(input_ids=ONES[:, :2], attention_mask=ONES[:, :2], **{CACHE: copy.deepcopy(two_tokens())}),
    ),
    # What ties rows together
    "seeds_in_lockstep": (
        "verification='token' and layout='lockstep', where.*use verification='coupled'",
        partial(call, {"verification": "token", "layout": "lockstep"}, seeds=[1, 2], **SAMPLED),
    ),
    "guided_encoder_decoder": (
        "guidance_scale= works for decoder-only models.*T5ForConditionalGeneration has an encoder; leave",
        partial(call, target="encoder", draft="encoder", guidance_scale=1.5),
    ),
    "negative_prompt_that_ends_in_a_pad": ("row 0 .* ends in 0.*side='left'", lambda: negative(ONES, torch.eye(2, 3))),
    "ranks_with_states": ("synced_gpus=True needs the same forwards.*use a target", partial(spread, target="unknown")),
    "schedule_that_varies": (
        "schedule='heuristic' changes the number.*use 'constant'",
        partial(spread, num_assistant_tokens_schedule="heuristic"),
    ),
}
