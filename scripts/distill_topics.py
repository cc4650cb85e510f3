"""Train the draft of the embedded pair for English documentation: `pydoc_data.topics`, half of it held out.

The embedded pair knows the source code of the standard library; this is a text that neither model was trained on.

    python scripts/distill_topics.py --folder build/topics             # goes on if it was interrupted
    python scripts/distill_topics.py --folder build/topics --speed     # then: both drafts and plain generate, in turns
    python scripts/distill_topics.py --draft layers:2 --folder build/layers     # from the target's first two layers
"""

import statistics
from pathlib import Path
from pydoc_data import topics
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import PreTrainedModel

from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.measure.contenders import Contender
from hf_specx.measure.timer import Timer, speedups
from hf_specx.training.distill import distill
from hf_specx.training.recipe import TrainingRecipe
from hf_specx.training.result import Distilled


PROMPT_TOKENS, APART = 64, 128  # tokens of a prompt, and from the start of one to the start of the next
LEARNED = 192  # tokens of a prompt that the draft learns from itself
HELD_OUT = 160  # prompts of the half that is not trained on
TURNS, NEW_TOKENS = 9, 128
console = Console()


def topic_prompts(pair: DraftTargetPair, tokens: int = PROMPT_TOKENS) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of up to so many tokens of every second topic, to train on, and some of 64 of the others."""
    tokenizer: Any = pair.tokenizer
    halves: tuple[list[list[int]], list[list[int]]] = ([], [])
    for number, name in enumerate(sorted(topics.topics)):
        ids = tokenizer(topics.topics[name], add_special_tokens=False)["input_ids"]
        starts = range(0, len(ids) - PROMPT_TOKENS + 1, APART)
        length = PROMPT_TOKENS if number % 2 else tokens
        halves[number % 2].extend(ids[start : start + length] for start in starts)
    every = max(1, len(halves[1]) // HELD_OUT)
    return halves[0], halves[1][::every][:HELD_OUT]


def train(pair: DraftTargetPair, draft: str, folder: Path | None, **options: Any) -> Distilled:
    """Train the embedded draft, or "layers:N"."""
    prompts, held_out = topic_prompts(pair, LEARNED if options.get("learn_from_prompts") else PROMPT_TOKENS)
    console.print(f"{len(prompts)} prompts to train on, {len(held_out)} held out")
    given: PreTrainedModel | str = pair.models[1] if draft == "embedded" else draft
    return distill(
        pair.target,
        given,
        prompts,
        held_out=held_out,
        folder=folder,
        tokenizer=pair.tokenizer,
        draft_tokenizer=pair.tokenizer,
        **options,
    )


def compare(pair: DraftTargetPair, drafts: dict[str, PreTrainedModel], rows: int) -> None:
    """Print how many times as fast as plain `generate` the target is with each draft: medians of runs in turns."""
    _, held_out = topic_prompts(pair)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": True, "top_k": 0}
    batches = []
    for turn in range(TURNS):
        ids = torch.tensor(held_out[turn * rows : (turn + 1) * rows])
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def make(name: str) -> Contender:
        strategy = None if name == "plain" else SpeculativeDecoding(drafts[name])
        return Contender(name, pair.target, strategy=strategy)

    found = Timer(make, batches, options | {"pad_token_id": 1}, list(range(TURNS))).time(["plain", *drafts])
    for name in drafts:
        ratios = speedups(found[name].rates, found["plain"].rates)
        rates = [report.acceptance_rate for report in found[name].reports]
        shown = f"batch {rows}, {name}: {statistics.median(ratios):.2f} of plain generate"
        console.print(f"{shown} ({min(ratios):.2f} to {max(ratios):.2f}), acceptance {statistics.median(rates):.2f}")


def main(
    draft: Annotated[str, typer.Option(help="embedded, or layers:N")] = "embedded",
    folder: Annotated[Path | None, typer.Option(help="texts and checkpoints; none are kept if not given")] = None,
    loss: str = TrainingRecipe().loss,
    phases: int = 16,
    texts_per_phase: int = 64,
    passes: int = 4,
    learn_from_prompts: bool = False,
    learning_rate: float | None = None,
    seed: int = 0,
    speed: Annotated[bool, typer.Option("--speed", help="time the drafts after the training")] = False,
) -> None:
    pair = DraftTargetPair.embedded()
    how: dict[str, Any] = {"loss": loss, "phases": phases, "texts_per_phase": texts_per_phase, "passes": passes}
    how |= {"learn_from_prompts": learn_from_prompts}
    result = train(pair, draft, folder, **how, learning_rate=learning_rate, seed=seed)
    console.print(str(result))
    for rows in (1, 8) if speed else ():
        compare(pair, {"shipped draft": pair.models[1], "trained draft": result.pair.models[1]}, rows)


if __name__ == "__main__":
    typer.run(main)
