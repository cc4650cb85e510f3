"""What each logits processor costs: `python scripts/processor_cost.py [TURNS [NAME ...]]`.

The pair in the package, in float32, sampled, at batch 1 and 8; contenders take turns in one process of one thread. For
each processor of transformers there are three figures: the time of a round with it over that of a round without, both
with 5 candidates; and the speed of 5 candidates, and of the default, over that of plain `generate` under that
processor. Each is the median of the turns' ratios; a round's time in a turn is the median of its rounds. It is CPU
time, which other processes disturb less than wall time.
"""

import itertools
import statistics
import sys
import time
from typing import Any

import torch
from transformers import PreTrainedModel, SynthIDTextWatermarkingConfig

from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.common.round import Round


TURNS, NEW_TOKENS, CANDIDATES = 9, 64, 5
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition_penalty": {"repetition_penalty": 1.05},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.05},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 4},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 4},
    "min_new_tokens": {"min_new_tokens": NEW_TOKENS, "eos_token_id": 0},
    "min_length": {"min_length": 20 + NEW_TOKENS, "eos_token_id": 0},
    "bad_words_ids": {"bad_words_ids": [[7], [300, 301], [40, 41, 42]]},
    "sequence_bias": {"sequence_bias": [[[7], -1.0], [[300, 301], 1.0], [[40, 41, 42], 1.0]]},
    "suppress_tokens": {"suppress_tokens": [5, 6, 7]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [5, 6, 7]},
    "forced_eos_token_id": {"forced_eos_token_id": 0},
    "forced_bos_token_id": {"forced_bos_token_id": 4},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (0, 1.0001), "eos_token_id": 4095},
    "watermarking_config": {"watermarking_config": {"bias": 0.5}},
    "SynthID": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=list(range(20)), ngram_len=5)},
    "remove_invalid_values": {"remove_invalid_values": True},
    "all of a chat model": {"repetition_penalty": 1.05, "no_repeat_ngram_size": 6, "temperature": 0.7, "top_p": 0.9},
}


class Clock:
    """Notes when each round ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def observe(self, done: Round) -> None:
        self.ends.append(time.process_time())

    def round_seconds(self) -> float:
        """The median over the rounds of a call."""
        return statistics.median(end - start for start, end in itertools.pairwise(self.ends))


class Measured:
    """Times of calls on one batch.

    Args:
        target, draft: the pair.
        inputs: prompts, as `generate` takes them.
    """

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel, inputs: dict[str, torch.Tensor]):
        self.target, self.inputs, self.clock = target, inputs, Clock()
        self.fixed = SpeculativeDecoding(draft, num_draft_tokens=CANDIDATES)
        self.default = SpeculativeDecoding(draft)
        self.fixed.listeners = (self.clock,)
        self.seconds({}, self.default, 0)  # measures its costs

    def seconds(self, settings: dict[str, Any], strategy: SpeculativeDecoding | None, seed: int) -> float:
        """Of one call; without a strategy, of plain `generate`."""
        given = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 1}
        given |= self.inputs | settings | {"custom_generate": strategy}
        self.clock.ends.clear()
        torch.manual_seed(seed)
        started = time.process_time()
        self.target.generate(**given)  # type: ignore[operator]
        return time.process_time() - started

    def turn(self, settings: dict[str, Any], seed: int) -> tuple[float, float, float]:
        """The three figures of a processor in one turn."""
        took: dict[str, float] = {}
        order = ["with", "without", "default", "plain"]
        for name in order[seed % 4 :] + order[: seed % 4]:
            if name in ("with", "without"):
                took[name + " a call"] = self.seconds(settings if name == "with" else {}, self.fixed, seed)
                took[name] = self.clock.round_seconds()
            else:
                took[name] = self.seconds(settings, self.default if name == "default" else None, seed)
        plain = took["plain"]
        return took["with"] / took["without"], plain / took["with a call"], plain / took["default"]


def main() -> None:
    """Measure each setting, batch by batch."""
    torch.set_num_threads(1)
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    pair = DraftTargetPair.embedded()
    assert pair.tokenizer is not None
    assert isinstance(pair.draft, PreTrainedModel)
    target, draft = pair.target.float(), pair.draft.float()
    print("| batch | processor | a round with over one without | 5 candidates over plain | default over plain |")
    print("| --- | --- | --- | --- | --- |")
    for rows in (1, 8):
        texts = [pair.prompts[i % len(pair.prompts)] for i in range(rows)]
        tokens = pair.tokenizer(texts, return_tensors="pt", padding=True)
        measured = Measured(target, draft, {name: tokens[name] for name in ("input_ids", "attention_mask")})
        for name in sys.argv[2:] or SETTINGS:
            found = [measured.turn(SETTINGS[name], seed) for seed in range(turns)]
            figures = [statistics.median(column) for column in zip(*found, strict=True)]
            print(f"| {rows} | {name} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
