"""What tests that try drafts share: sizes of models, a quick study, times of forwards."""

from tiny_tokenizer import TEXTS
from transformers import PreTrainedModel
from zoo import build

from hf_specx.bench.study import Study


SIZES = {"vocab_size": 280, "eos_token_id": None, "pad_token_id": 1}
QUICK = Study(list(TEXTS), (1, 2), {"max_new_tokens": 6, "do_sample": True, "top_k": 0}, repeats=1, command="typed")
FREE = {1: 1.0, 9: 1.0}, 0.01  # a larger forward costs nothing more, a draft step next to nothing
DEAR = {1: 1.0, 9: 9.0}, 0.9


def tiny_t5() -> PreTrainedModel:
    model = build("seq2seq", "t5")
    model.resize_token_embeddings(280)
    return model


def saved(folder, model, tokenizer=None):
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)
