"""What logits processors cost in a queue: rounds of the pair in the package with each of them, and without any.

    python scripts/processors_of_queues.py      # on an idle machine

All requests have the same processor, which is applied to all rows at once. Ways take turns; the table has medians of
the time of a round, and of its ratio to that of the same turn without a processor.
"""

import statistics
import time
import warnings
from typing import Any

from rich.progress import track

from hf_specx import DraftTargetPair, Request, SpeculativeDecoding
from hf_specx.hub.known_pairs import DRAFT_MODEL, embedded_folder


ROWS, REQUESTS, NEW_TOKENS, CANDIDATES, TURNS = 16, 48, 48, 4, 6  # the first turn is not counted
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition_penalty=1.1": {"repetition_penalty": 1.1},
    "no_repeat_ngram_size=4": {"no_repeat_ngram_size": 4},
}


def milliseconds_of_a_round(pair: DraftTargetPair, settings: dict[str, Any]) -> float:
    """The mean time of a round of one queue."""
    assert pair.tokenizer is not None
    prompts = [pair.tokenizer(prompt).input_ids for prompt in pair.prompts]
    requests = [Request(prompts[number % len(prompts)], max_new_tokens=NEW_TOKENS) for number in range(REQUESTS)]
    strategy = SpeculativeDecoding(pair.draft, num_draft_tokens=CANDIDATES)
    options = {"batch_size": ROWS, "do_sample": False, "eos_token_id": None} | settings
    begun = time.perf_counter()
    for _ in strategy.generate_many(pair.target, requests, **options):
        pass
    seconds = time.perf_counter() - begun
    assert strategy.report is not None
    return 1e3 * seconds / strategy.report.rounds


def main() -> None:
    """Print a row for each processor."""
    warnings.simplefilter("ignore")
    pair = DraftTargetPair.embedded(draft=str(embedded_folder() / DRAFT_MODEL))
    turns = [
        {way: milliseconds_of_a_round(pair, settings) for way, settings in WAYS.items()}
        for _ in track(range(TURNS), description="measuring")
    ][1:]
    print("| processor | a round, ms | times that without one |\n| --- | ---: | ---: |")
    for way in WAYS:
        taken = statistics.median(turn[way] for turn in turns)
        ratio = statistics.median(turn[way] / turn["none"] for turn in turns)
        print(f"| {way} | {taken:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
