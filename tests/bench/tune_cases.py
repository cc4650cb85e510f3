"""What tests that try drafts share: sizes of models, a quick study, times of forwards."""

import torch
from tiny_tokenizer import TEXTS
from transformers import T5Config, T5ForConditionalGeneration

from hf_specx.bench.study import Study


SIZES = {"vocab_size": 280, "eos_token_id": None, "pad_token_id": 1}
QUICK = Study(list(TEXTS), (1, 2), {"max_new_tokens": 6, "do_sample": True, "top_k": 0}, repeats=1, command="typed")
FREE = {1: 1.0, 9: 1.0}, 0.01  # a larger forward costs nothing more, a draft step next to nothing
DEAR = {1: 1.0, 9: 9.0}, 0.9


def tiny_t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": 280, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1}
    ids = {"decoder_start_token_id": 1, "eos_token_id": 0, "pad_token_id": 1}
    return T5ForConditionalGeneration(T5Config(**sizes, **ids)).eval()


def save(folder, model, tokenizer=None):
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)
