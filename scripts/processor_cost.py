"""What each logits processor costs: `python scripts/processor_cost.py [TURNS [NAME ...]]`, on an idle machine.

The pair in the package, in float32, sampled, at batch 1 and 8; contenders take turns in one process. For each
processor of transformers there are three figures: the time of a round with it over that of a round without, both with
5 candidates; and the speed of 5 candidates, and of the default, over that of plain `generate` under that processor.
Each is the median of the turns' ratios; a round's time in a turn is the median of its rounds.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx import DraftTargetPair, SpeculativeDecoding


TURNS, NEW_TOKENS, CANDIDATES = 9, 96, 5
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
    "remove_invalid_values": {"remove_invalid_values": True},
    "all of a chat model": {"repetition_penalty": 1.05, "no_repeat_ngram_size": 6, "temperature": 0.7, "top_p": 0.9},
}


class Measured:
    """Times of calls on one batch.

    Args:
        target: the target.
        inputs: prompts, as `generate` takes them.
    """

    def __init__(self, target: PreTrainedModel, inputs: dict[str, torch.Tensor]):
        self.target, self.inputs = target, inputs

    def seconds(self, settings: dict[str, Any], strategy: SpeculativeDecoding | None, seed: int) -> float:
        """Of one call; without a strategy, of plain `generate`."""
        given = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 1}
        given |= self.inputs | settings | {"custom_generate": strategy}
        torch.manual_seed(seed)
        started = time.perf_counter()
        self.target.generate(**given)  # type: ignore[operator]
        return time.perf_counter() - started

    def round_seconds(self, settings: dict[str, Any], strategy: SpeculativeDecoding, seed: int) -> float:
        """The median over the rounds of a call."""
        self.seconds(settings, strategy, seed)
        assert strategy.report is not None
        laps = [seconds[1:] for seconds in strategy.report.laps.values()]  # the first reads the prompts
        return statistics.median(map(sum, zip(*laps, strict=True)))

    def ratios(
        self, settings: dict[str, Any], fixed: SpeculativeDecoding, default: SpeculativeDecoding, turns: int
    ) -> list[float]:
        """The three figures of a processor."""
        contenders: dict[str, Callable[[int], float]] = {
            "with": partial(self.round_seconds, settings, fixed),
            "without": partial(self.round_seconds, {}, fixed),
            "fixed": partial(self.seconds, settings, fixed),
            "default": partial(self.seconds, settings, default),
            "plain": partial(self.seconds, settings, None),
        }
        found = []
        for turn in range(-1, turns):  # the first is not counted
            order = [*contenders][turn % 5 :] + [*contenders][: turn % 5]
            took = {name: contenders[name](turn + 1) for name in order}
            plain = took["plain"]
            found.append((took["with"] / took["without"], plain / took["fixed"], plain / took["default"]))
        return [statistics.median(column) for column in zip(*found[1:], strict=True)]


def main() -> None:
    """Measure each setting, batch by batch."""
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    pair = DraftTargetPair.embedded()
    assert pair.tokenizer is not None
    target, draft = pair.target.float(), pair.draft.float()
    fixed, default = SpeculativeDecoding(draft, num_draft_tokens=CANDIDATES), SpeculativeDecoding(draft)
    print("| batch | processor | a round with over one without | 5 candidates over plain | default over plain |")
    print("| --- | --- | --- | --- | --- |")
    for rows in (1, 8):
        texts = [pair.prompts[i % len(pair.prompts)] for i in range(rows)]
        tokens = pair.tokenizer(texts, return_tensors="pt", padding=True)
        measured = Measured(target, {name: tokens[name] for name in ("input_ids", "attention_mask")})
        measured.seconds({}, default, 0)  # its costs
        for name in sys.argv[2:] or SETTINGS:
            figures = measured.ratios(SETTINGS[name], fixed, default, turns)
            print(f"| {rows} | {name} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
