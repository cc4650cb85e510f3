"""Every kind of bad input and misuse that we know: what is done, and a part of what is said to it.

The names are those of the checks; what follows a comma tells cases of one check apart.
"""

import copy
from functools import partial
from pathlib import Path

import torch
from misuse import (
    IDS,
    ONES,
    Closing,
    Counting,
    Reader,
    Tokens,
    both_pasts,
    call,
    call_of_1,
    directly,
    embeds,
    full_window,
    function,
    get,
    heard,
    holed_decoder,
    later,
    made,
    masked,
    negative,
    of_one_text,
    of_pair,
    on_the_oldest,
    only_encoded,
    put,
    spread,
    strategy,
    to_compile,
    to_compile_by_an_old_torch,
    to_compile_under_hooks,
    two_tokens,
)
from tiny import prompts
from transformers import GenerationConfig, StaticCache, TextStreamer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_specx import DraftTargetPair, SpeculativeDecoding, generate
from hf_specx.generate import STOCK
from hf_specx.validation.calls import check_call
from hf_specx.validation.entry import check_arguments
from hf_specx.validation.models import check_target


SAMPLED = {"do_sample": True, "top_k": 0}
LOOKUP = PromptLookupCandidateGenerator(num_output_tokens=3, max_length=50)

CASES = {
    # What a strategy is made of
    "draft_by_name": ("draft_model='org/draft' is a name; load it first", lambda: SpeculativeDecoding("org/draft")),
    "draft_by_name, path": ("draft_model='draft' is a name; load", lambda: SpeculativeDecoding(Path("draft"))),
    "draft_of_no_kind": ("draft_model is a dict; give a model", lambda: SpeculativeDecoding({})),
    "draft_without_head": ("LlamaModel, which scores no next token", lambda: strategy("no head")),
    "generator_of_one_text": ("AssistedCandidateGenerator, made for one text; give its", of_one_text),
    "generator_that_reads_outputs": ("Reader, which reads the target's", lambda: SpeculativeDecoding(Reader())),
    "generator_to_time": (
        "has no forward to time; give num_draft_tokens as a number",
        lambda: SpeculativeDecoding(LOOKUP).calibrate(get("target"), IDS),
    ),
    "unknown_option": (
        "unknown option 'num_drafts'; did you mean 'num_draft_tokens'. known: num_draft_tokens, ",
        partial(made, num_drafts=5),
    ),
    "number_of_drafts_is_none": ("num_draft_tokens='many' is not a number", partial(made, num_draft_tokens="many")),
    "number_of_drafts_is_none, float": ("num_draft_tokens=2.5 is not", partial(made, num_draft_tokens=2.5)),
    "number_of_drafts_is_none, bool": ("num_draft_tokens=True is not", partial(made, num_draft_tokens=True)),
    "number_of_drafts_below_1": ("num_draft_tokens=0 is below 1; give 1", partial(made, num_draft_tokens=0)),
    "number_of_drafts_below_1, far": ("num_draft_tokens=-3 is below 1", partial(made, num_draft_tokens=-3)),
    "unknown_verification": ("verification='typical' is unknown; choose", partial(made, verification="typical")),
    "unknown_layout": ("layout='diagonal' is unknown; choose one of auto, rag", partial(made, layout="diagonal")),
    "unknown_stream_by": ("stream_by='word' is unknown; choose one of token", partial(made, stream_by="word")),
    "compile_of_no_kind": ("compile='max' is not a bool; use True", partial(made, compile="max")),
    "compiled_in_another_layout": (
        "goes with layout='ragged', and LlamaForCausalLM would be decoded in 'padded'.*use compile=False",
        partial(to_compile, {"layout": "padded"}),
    ),
    "compiled_in_another_layout, in order": (
        "decoded in 'lockstep' .needed: Counting must be shown",
        lambda: to_compile(logits_processor=[Counting()]),
    ),
    "forward_that_cannot_be_compiled": (
        "cannot compile LlamaForCausalLM: its frequencies follow the length of the text; use compile=False",
        partial(to_compile, target="long"),
    ),
    "forward_that_cannot_be_compiled, draft": (
        "cannot compile LlamaForCausalLM: its frequencies",
        partial(to_compile, draft="long"),
    ),
    "compiled_over_several_devices": ("is on 'cpu' under hooks of accelerate; use", to_compile_under_hooks),
    "compiled_over_several_devices, ranks": ("is on 'cpu' of several ranks; use", partial(spread, compile=True)),
    "compiled_without_compiler": (
        "compile=True needs a C.. compiler for device 'cpu'; install one, or use compile=False",
        partial(to_compile, found=False),
    ),
    "compiled_without_compiler, torch": (
        "compile=True needs torch 2.9 or later for device 'cpu'; install one, or use compile=False",
        to_compile_by_an_old_torch,
    ),
    "compiled_with_outputs": (
        "output_hidden_states=True is not compiled; leave it out, or use compile=False",
        partial(to_compile, return_dict_in_generate=True, output_hidden_states=True),
    ),
    "streamer_without_methods": ("streamer is a int without put and end; pass a", partial(made, streamer=3)),
    "tokenizer_without_methods": ("^tokenizer is a str without get_vocab; pass", partial(made, tokenizer="x")),
    "tokenizer_without_methods, draft": ("draft_tokenizer is a str without", partial(made, draft_tokenizer="x")),
    "costs_without_methods": ("costs is a dict without table and best.*strategy.costs", partial(made, costs={})),
    "assistant_tokens_below_1": (
        "num_assistant_tokens=-1 is not an int of 1 or more; give one",
        partial(function, num_assistant_tokens=-1, num_draft_tokens=...),
    ),
    "unknown_schedule": (
        "num_assistant_tokens_schedule='random' is unknown; choose one of constant",
        partial(function, num_assistant_tokens_schedule="random"),
    ),
    "threshold_that_is_no_probability": (
        "assistant_confidence_threshold=1.5 is no probability; give a number",
        partial(function, assistant_confidence_threshold=1.5),
    ),
    # The models
    "target_of_no_kind": ("model is a str; give the target itself", lambda: generate(IDS, model="org/target")),
    "target_of_no_kind, pair": ("model is a str; give", lambda: DraftTargetPair("org/target", get("draft"))),
    "target_without_head": ("model is a LlamaModel, which scores no next", partial(function, target="no head")),
    "target_in_training": ("the target is in training mode.*target.eval", partial(call, target="training")),
    "draft_in_training": ("the draft is in training mode.*draft.eval", partial(call, draft="training")),
    "weights_not_loaded": ("the draft model has parameters on the meta device", partial(call, draft="empty")),
    "weights_not_loaded, target": ("the target model has parameters", lambda: check_target(get("empty"), 9)),
    "attends_in_both_directions": ("attends in both directions.*set is_decoder", partial(call, target="both ways")),
    "frequencies_that_change": (
        "rope_type='dynamic' changes its frequencies behind position 12",
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
    "other_mel_bins": ("the target hears 8 mel bins and the draft 16.*=8", partial(heard, "more bins")),
    "other_encoder_width": ("encoder outputs of width 48.*have 32; choose", partial(heard, "wide whisper")),
    "vocabularies_of_other_sizes": ("48 tokens and the draft 50.*pass", partial(call, draft="other vocabulary")),
    "tokens_of_another_meaning": (
        "the two tokenizers differ, for instance in '0' with id 0; .* needs a draft with the target's own",
        partial(call, {"tokenizer": Tokens(48), "draft_tokenizer": Tokens(48, "zero")}),
    ),
    "suppression_lifted": (
        "drops begin_suppress_tokens .*pass the draft as draft_model=",
        lambda: generate(model=get("whisper"), **dict.fromkeys(STOCK) | {"assistant_model": get("draft")}),
    ),
    "type_that_is_not_exact": ("model type 'rwkv' cannot be a target.*choose an", partial(call, target="own cache")),
    "type_that_is_not_exact, draft": ("'rwkv' cannot be a draft.*choose", partial(call, draft="own cache")),
    "attention_without_layout": ("by position only.*load it with 'sdpa'", partial(call, target="by mask")),
    "layout_that_is_not_exact": (
        "layout='padded' has not been shown .*'never_heard_of'.*use 'lockstep' or 'auto'",
        partial(call, {"layout": "padded"}, target="unknown"),
    ),
    "type_of_a_later_version": ("'doge' has been shown .* 99.0 and later, not on", lambda: on_the_oldest("doge")),
    # What a call asks for
    "beam_search": ("num_beams=3 is beam search; set num_beams=1", partial(call, num_beams=3)),
    "groups_of_beams": ("num_beam_groups=2 is beam search; leave", partial(call, num_beam_groups=2)),
    "penalty_alpha": ("penalty_alpha=0.6 selects contrastive", partial(call, penalty_alpha=0.6, top_k=4)),
    "dola_layers": ("dola_layers='low' selects DoLa;.*leave", partial(call, dola_layers="low")),
    "prompt_lookup_num_tokens": ("=3 selects prompt lookup;.*leave", partial(call, prompt_lookup_num_tokens=3)),
    "assistant_early_exit": ("=1 selects early exit;.*leave", partial(call, assistant_early_exit=1)),
    "use_mtp": ("use_mtp=True selects multi-token prediction", partial(call, use_mtp=True)),
    "speculation_type": ("='dflash' selects a kind of draft.*leave", partial(call, speculation_type="dflash")),
    "assistant_ensemble_weight": ("=0.5 selects a mixture", partial(call, assistant_ensemble_weight=0.5)),
    "constraints": (r"constraints=\[1\] selects decoding under constraints", partial(call, constraints=[1])),
    "force_words_ids": (r"=\[\[1\]\] selects decoding with forced words", partial(call, force_words_ids=[[1]])),
    "no_cache": ("use_cache=False cannot be honoured.*use_cache=True", partial(call, use_cache=False)),
    "other_cache": ("cache_implementation='static' cannot be", partial(call, cache_implementation="static")),
    "static_past": (
        "past_key_values is a StaticCache, .*pass a DynamicCache",
        lambda: call(past_key_values=StaticCache(get("target").config, max_cache_len=40)),
    ),
    "attentions_of_no_kind": (
        "output_attentions=True is not available for model type 'falcon'.*load it with 'eager'",
        partial(call, target="falcon", return_dict_in_generate=True, output_attentions=True),
    ),
    "past_without_columns": (
        "layout='ragged' needs the keys of all tokens.*use layout='auto'",
        lambda: call({"layout": "ragged"}, "sliding", past_key_values=copy.deepcopy(full_window()), **later()),
    ),
    "past_without_a_cache": (
        "past_key_values= cannot be continued by FSMT.*pass the whole text",
        lambda: call(target="encoder without cache", draft="encoder", past_key_values=both_pasts()),
    ),
    "chunks_without_a_cache": (
        "prefill_chunk_size=4 cannot be honoured by OpenAIGPT.*leave it out",
        partial(call, target="no cache", draft="no cache", prefill_chunk_size=4),
    ),
    "packed_past": (
        "layout='packed' starts empty, and past_key_values holds 2 tokens; use layout='ragged'",
        lambda: call({"layout": "packed"}, past_key_values=copy.deepcopy(two_tokens())),
    ),
    "packed_chunks": ("not prefill_chunk_size=4; use", partial(call, {"layout": "packed"}, prefill_chunk_size=4)),
    "packed_embeds": ("and inputs_embeds was passed; use layout", partial(call, {"layout": "packed"}, **embeds())),
    "packed_others": (
        "and token_type_ids was passed too; use layout='ragged'",
        partial(call, {"layout": "packed"}, target="learned", token_type_ids=torch.ones(2, 6, dtype=torch.int64)),
    ),
    "packed_without_positions": (
        "has position_ids of shape .3, 2, 6.; use layout='ragged'",
        partial(call, {"layout": "packed"}, position_ids=torch.arange(6).expand(3, 2, 6)),
    ),
    "noise_that_cannot_be_redrawn": (
        "cannot redraw stock's noise on device type 'meta'; use 'block' there",
        lambda: check_call(torch.ones(1, 3, device="meta"), GenerationConfig(), {}, "coupled", None),
    ),
    "streamer_of_one_row": (
        "a TextStreamer takes one row, and the batch has 2; use hf_specx.BatchStreamer",
        lambda: call({"streamer": TextStreamer(tokenizer=None)}),
    ),
    "withheld_streamer": ("pass streamer= on.*use Spec", lambda: call_of_1(streamer=Closing())),
    "withheld_assistant_model": ("pass assistant_model= on.*leave", lambda: call_of_1(assistant_model=get("draft"))),
    "withheld_synced_gpus": ("pass synced_gpus= on.*use hf_specx.generate", lambda: call_of_1(synced_gpus=True)),
    "withheld_tokenizer": ("pass tokenizer= on.*use Spec", lambda: call_of_1(tokenizer=Tokens(48))),
    "withheld_assistant_tokenizer": ("pass assistant_tok.*use", lambda: call_of_1(assistant_tokenizer=Tokens(48))),
    # Its text
    "ids_of_another_shape": (
        "of shape .2, 6, 1. is no batch.*; pass",
        partial(call, input_ids=IDS[..., None], attention_mask=...),
    ),
    "ids_that_are_no_integers": ("input_ids has dtype torch.float32; pass int", partial(call, input_ids=IDS.float())),
    "empty_prompt": ("the prompt is empty.*pass at least one token", lambda: directly(IDS[:, :0])),
    "unknown_token": ("has the token id 48, and.* 0 to 47; use", partial(call, input_ids=IDS.clamp(min=48))),
    "unknown_token, negative": ("has the token id -100, and", partial(call, input_ids=IDS.clamp(max=-100))),
    "embeds_of_another_width": ("of width 16 .* the target .* in 32; make", partial(call, **embeds(width=16))),
    "embeds_for_another_draft": ("width 32 .* draft .* in 16; pass", partial(call, draft="narrow", **embeds())),
    "encoded_already": ("the draft T5.* has an encoder of its own; pass what", only_encoded),
    "positions_for_other_tokens": (".2, 5. has no position.*leave", partial(call, position_ids=torch.ones(2, 5))),
    "positions_for_other_tokens, rows": (".3, 6. has no position", partial(call, position_ids=torch.ones(3, 6))),
    "mask_of_other_dimensions": (
        "attention_mask of shape .2, 1, 6. is no 2D mask; pass",
        partial(masked, lambda mask: mask[:, None] * 0, **embeds()),
    ),
    "mask_for_other_rows": ("has 3 rows and the batch 2; pass", partial(masked, lambda mask: torch.eye(3, 6))),
    "mask_for_other_tokens": ("has 7 columns, and the text 6", partial(masked, lambda mask: torch.ones(2, 7))),
    "mask_for_other_tokens, few": ("has 5 columns, and the text 6", partial(masked, lambda mask: torch.eye(2, 5))),
    "mask_of_other_values": ("has the value -1000.0; pass 1", partial(masked, lambda mask: (mask.tril() - 1) * 1e3)),
    "empty_row": ("the prompt of row 1 is empty .*; pass", partial(masked, put(1, slice(None)))),
    "padding_on_the_right": ("row 1 .* ends in 0.*padding_side='left'", partial(masked, put(1, slice(4, 6)))),
    "holes_in_the_mask": ("decoder_attention_mask has zeros between.*on the left only", holed_decoder),
    "decoder_prompt_without_a_cache": (
        "decoder_input_ids of 4 tokens.*give one token a row",
        lambda: call(target="encoder without cache", draft="encoder without cache", decoder_input_ids=ONES),
    ),
    "packed_holes": (
        "attention_mask has zeros between tokens; use layout='ragged'",
        partial(masked, put(0, 3), options={"layout": "packed"}),
    ),
    "text_that_was_read": (
        "holds 2 tokens, and the whole text has 2; pass the text with",
        lambda: call(input_ids=ONES[:, :2], attention_mask=ONES[:, :2], past_key_values=copy.deepcopy(two_tokens())),
    ),
    # What ties rows together
    "seeds_of_no_kind": ("seeds=7 is not a list of ints; give one", partial(call, seeds=7)),
    "seeds_of_no_kind, float": (r"seeds=\[1.5, 2\] is not a list", partial(call, seeds=[1.5, 2])),
    "seeds_for_other_rows": ("2 seeds for 4 rows", partial(call, seeds=[1, 2], num_return_sequences=2, **SAMPLED)),
    "seed_out_of_range": ("the seed -1 is not in the range.*give ints from 0", partial(call, seeds=[1, -1])),
    "seeds_in_lockstep": (
        "verification='token' and layout='lockstep', where.*use verification='coupled'",
        partial(call, {"verification": "token", "layout": "lockstep"}, seeds=[1, 2], **SAMPLED),
    ),
    "layout_out_of_order": (
        "layout='ragged' lets rows advance on their own, and Counting must.*use layout='auto'",
        lambda: call({"layout": "ragged"}, logits_processor=[Counting()]),
    ),
    "block_out_of_order": (
        "verification='block' looks at all candidates .*Counting must.*use verification='token'",
        lambda: call({"verification": "block"}, logits_processor=[Counting()], **SAMPLED),
    ),
    "guided_encoder_decoder": (
        "guidance_scale= works for decoder-only models.*T5ForConditionalGeneration has an encoder; leave",
        partial(call, target="encoder", draft="encoder", guidance_scale=1.5),
    ),
    "negative_prompts_for_other_rows": ("has 3 rows and the batch 2.*give one", lambda: negative(ONES.T)),
    "negative_mask_of_another_shape": (
        "mask of shape .2, 2. does not fit .*; pass",
        lambda: negative(ONES, ONES[:, 1:]),
    ),
    "negative_prompt_that_ends_in_a_pad": ("row 0 .* ends in 0.*side='left'", lambda: negative(ONES, torch.eye(2, 3))),
    "ranks_with_states": ("synced_gpus=True needs the same forwards.*use a target", partial(spread, target="unknown")),
    "ranks_with_guidance": (
        "guidance that was used before.*pass guidance_scale=",
        lambda: spread(logits_processor=[UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, get("draft"))]),
    ),
    "schedule_that_varies": (
        "schedule='heuristic' changes the number.*use 'constant'",
        partial(spread, num_assistant_tokens_schedule="heuristic"),
    ),
    "threshold_that_varies": (
        "threshold=0.3 changes the number.*set it to 0",
        partial(spread, assistant_confidence_threshold=0.3),
    ),
    # The function
    "no_draft": ("no draft: pass draft_model= or assistant_model=", partial(function, draft_model=...)),
    "argument_of_another_entry": ("custom_generate= has no .*; use", lambda: of_pair(custom_generate="org/x")),
    "argument_of_another_entry, draft": ("draft_model= has no", lambda: of_pair(draft_model=get("narrow"))),
    "given_twice": ("assistant_model= mean the same; pass", lambda: function(assistant_model=get("narrow"))),
    "given_twice, tokenizer": (
        "assistant_tokenizer= mean",
        partial(function, draft_tokenizer=Tokens(4), assistant_tokenizer=Tokens(4)),
    ),
    "method_by_path": ("transformers ignores; pass it as a str", partial(function, custom_generate=Path("here"))),
    "inputs_that_are_no_tensor": ("is a dict; pass", lambda: function(inputs={}, input_ids=..., attention_mask=...)),
    "inputs_that_are_no_tensor, list": ("input_ids is a list; pass", lambda: function(input_ids=IDS.tolist())),
    "config_of_no_kind": ("generation_config is a dict; pass", partial(function, generation_config={})),
    "functions_without_a_list": ("is a Counting; pass a list", lambda: function(logits_processor=Counting())),
    "functions_without_a_list, criterion": ("is a function; pass", lambda: function(stopping_criteria=prompts)),
    "paged_cache": (
        "cache_implementation='paged' turns.*leave it out",
        lambda: check_arguments(None, get("target"), {"cache_implementation": "paged"}, ()),
    ),
    "misspelt_option": ("'num_draft_token'; did you mean 'num_draft_tokens'", partial(function, num_draft_token=3)),
    "stop_strings_of_no_kind": ("strings=5 is no str", lambda: function(stop_strings=5, tokenizer=Tokens(48))),
    "stop_strings_without_tokenizer": ("needs the tokenizer; pass tok", partial(function, stop_strings=["x"])),
    "healing_without_tokenizer": ("token_healing=True needs.*pass", partial(function, token_healing=True)),
}
