"""Train the draft of the embedded pair for English documentation: `pydoc_data.topics`, half of it held out.

The embedded pair knows the source code of the standard library; this is a text that neither model was trained on.
`--fine-tune` trains the target on it first, by transformers' `Trainer`: a target that has no draft of its own.

    python scripts/distill_topics.py --folder build/topics --speed     # then both drafts and plain generate, in turns
    python scripts/distill_topics.py --folder build/tuned --fine-tune 300       # the draft of a fine-tuned target
    python scripts/distill_topics.py --folder build/layers --draft layers:2     # from the target's first two layers
"""

from pathlib import Path
from pydoc_data import topics
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from train_pair import fit
from transformers import PreTrainedModel

from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.bench.timer import compare
from hf_specx.training.distill import distill
from hf_specx.training.recipe import TrainingRecipe


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


def fine_tune(pair: DraftTargetPair, steps: int, folder: Path, seed: int, bf16: bool) -> None:
    """Train the target on the half that is not held out, or take what an earlier run of this folder has trained."""
    learned, held_out = topic_prompts(pair, LEARNED)
    before, data = loss(pair.target, held_out), [{"input_ids": ids, "labels": ids} for ids in learned]
    data = [each for each in data if len(each["labels"]) == LEARNED]
    how: dict[str, Any] = {"learning_rate": 5e-4, "warmup_steps": steps // 10, "per_device_train_batch_size": 8}
    fit(pair.target, data, steps, folder / f"target-{steps}-{seed}", bf16=bf16, seed=seed, **how)
    after = loss(pair.target, held_out)
    console.print(f"the target's loss on the other half: {before:.2f} nats a token, {after:.2f} after {steps} steps")


@torch.no_grad()
def loss(model: PreTrainedModel, texts: list[list[int]]) -> float:
    """Nats a token on texts of one length."""
    ids = torch.tensor(texts)
    return float(model(ids, labels=ids).loss)


def show_speed(pair: DraftTargetPair, drafts: dict[str, PreTrainedModel], rows: int) -> None:
    """Print how fast the target is with each draft, in turns with plain `generate`."""
    _, held_out = topic_prompts(pair)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": True, "top_k": 0}
    turns = [torch.tensor(held_out[turn * rows : (turn + 1) * rows]) for turn in range(TURNS)]
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in turns]
    for name, draft in drafts.items():
        found = compare(pair.target, SpeculativeDecoding(draft), batches, options | {"pad_token_id": 1}, TURNS)
        console.print(f"\nbatch {rows}, {name}\n{found}", soft_wrap=True)


def main(
    draft: Annotated[str, typer.Option(help="embedded, or layers:N")] = "embedded",
    folder: Annotated[Path, typer.Option(help="weights, texts and checkpoints")] = Path("build/topics"),
    fine_tune_steps: Annotated[int, typer.Option("--fine-tune", help="steps that the target is trained first")] = 0,
    loss_name: Annotated[str, typer.Option("--loss")] = TrainingRecipe().loss,
    phases: int = 16,
    texts_per_phase: int = 64,
    passes: int = 4,
    learn_from_prompts: bool = False,
    learning_rate: float | None = None,
    seed: int = 0,
    bf16: Annotated[bool, typer.Option("--bf16", help="training in mixed precision, faster on some CPUs")] = False,
    speed: Annotated[bool, typer.Option("--speed", help="time the drafts after the training")] = False,
) -> None:
    pair = DraftTargetPair.embedded()
    if fine_tune_steps:
        fine_tune(pair, fine_tune_steps, folder, seed, bf16)
    prompts, held_out = topic_prompts(pair, LEARNED if learn_from_prompts else PROMPT_TOKENS)
    console.print(f"{len(prompts)} prompts to train on, {len(held_out)} held out")
    result = distill(
        pair.target,
        pair.models[1] if draft == "embedded" else draft,
        prompts,
        held_out=held_out,
        folder=folder / "draft",
        tokenizer=pair.tokenizer,
        draft_tokenizer=pair.tokenizer,
        loss=loss_name,
        phases=phases,
        patience=phases,
        texts_per_phase=texts_per_phase,
        passes=passes,
        learn_from_prompts=learn_from_prompts,
        learning_rate=learning_rate,
        training={"bf16": True} if bf16 else {},
        seed=seed,
    )
    console.print(str(result), soft_wrap=True)
    for rows in (1, 8) if speed else ():
        show_speed(pair, {"shipped draft": pair.models[1], "trained draft": result.pair.models[1]}, rows)


if __name__ == "__main__":
    typer.run(main)
