"""Settings of `generate` that stand for every processor of transformers that is speculated, and for some of users."""

from criteria import RowAndPrefix
from transformers import SynthIDTextWatermarkingConfig
from transformers.generation import logits_process as host


SYNTHID = SynthIDTextWatermarkingConfig(3, [3, 1, 4, 1], context_history_size=9, sampling_table_size=32)
SETTINGS = {
    "temperature and truncation": {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "typical": {"typical_p": 0.8},
    "top-h": {"top_h": 0.6},
    "epsilon and eta": {"epsilon_cutoff": 0.02, "eta_cutoff": 0.02},
    "repetition": {"repetition_penalty": 1.4},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[3, 4], [7]]},
    "sequence bias": {"sequence_bias": [[[9], 2.0], [[5, 6], -3.0]]},
    "lengths": {"min_new_tokens": 9, "eos_token_id": 5, "exponential_decay_length_penalty": (12, 1.2)},
    "minimum length": {"min_length": 18, "eos_token_id": [5, 9]},
    "forced end": {"forced_eos_token_id": 4},
    "forced begin": {"forced_bos_token_id": 4},
    "suppressed": {"suppress_tokens": [1, 2], "begin_suppress_tokens": [3, 4]},
    "SynthID": {"watermarking_config": SYNTHID},
    "renormalised": {"renormalize_logits": True, "remove_invalid_values": True},
    "almost cold": {"temperature": 1e-3},
    "row, length and prefix": {
        "logits_processor": [RowAndPrefix()],
        "prefix_allowed_tokens_fn": lambda row, ids: [i for i in range(48) if (i + row + len(ids)) % 3],
        "eos_token_id": 7,
    },
    "of a chat": {"repetition_penalty": 1.05, "no_repeat_ngram_size": 3, "temperature": 0.7, "top_p": 0.9},
    "own and others": {
        "logits_processor": [RowAndPrefix(), host.NoRepeatNGramLogitsProcessor(2)],
        "repetition_penalty": 1.2,
    },
}
