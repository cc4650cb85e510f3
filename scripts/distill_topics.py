"""Train the draft of the embedded pair for English documentation: `pydoc_data.topics`, half of it held out.

The embedded pair knows the source code of the standard library; this is a text that neither model was trained on.
`--fine-tune` trains the target on it first, by transformers' `Trainer`: a target that has no draft of its own.

    python scripts/distill_topics.py --folder build/topics             # goes on if it was interrupted
    python scripts/distill_topics.py --folder build/topics --speed     # then: both drafts and plain generate, in turns
    python scripts/distill_topics.py --folder build/tuned --fine-tune 300       # the draft of a fine-tuned target
    python scripts/distill_topics.py --folder build/layers --draft layers:2     # from the target's first two layers
"""

import statistics
from pathlib import Path
from pydoc_data import topics
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from safetensors.torch import load_model, save_model
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.measure.contenders import Contender
from hf_specx.measure.timer import Timer, speedups
from hf_specx.training.distill import distill
from hf_specx.training.folder import TEXTS
from hf_specx.training.held_out import estimate, measure_alpha
from hf_specx.training.recipe import TrainingRecipe
from hf_specx.training.result import Distilled
from hf_specx.training.texts import Writer


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
    file, (learned, held_out) = folder / f"target-{steps}-{seed}.safetensors", topic_prompts(pair, LEARNED)
    before = loss(pair.target, held_out)
    if file.exists():
        load_model(pair.target, file)
    else:
        data: Any = [{"input_ids": ids, "labels": ids} for ids in learned if len(ids) == LEARNED]
        args = TrainingArguments(
            str(folder),
            max_steps=steps,
            learning_rate=5e-4,
            warmup_steps=steps // 10,
            per_device_train_batch_size=8,
            bf16=bf16,
            use_cpu=not torch.cuda.is_available(),
            seed=seed,
            save_strategy="no",
            report_to="none",
        )
        Trainer(pair.target, args, train_dataset=data).train()  # a list will do
        folder.mkdir(parents=True, exist_ok=True)
        save_model(pair.target, str(file.with_suffix(".part")))
        file.with_suffix(".part").replace(file)
    after = loss(pair.target.eval(), held_out)
    console.print(f"the target's loss on the other half: {before:.2f} nats a token, {after:.2f} after {steps} steps")


@torch.no_grad()
def loss(model: PreTrainedModel, texts: list[list[int]]) -> float:
    """Nats a token on texts of one length."""
    ids = torch.tensor(texts)
    return float(model(ids, labels=ids).loss)


def train(pair: DraftTargetPair, draft: str, folder: Path, **options: Any) -> Distilled:
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


def on_learned_prompts(pair: DraftTargetPair, made: Distilled, folder: Path) -> str:
    """α of both drafts after prompts that were trained on: how much of what is missing more prompts could bring."""
    known = made.split.training[:: max(1, len(made.split.training) // HELD_OUT)][:HELD_OUT]
    writer = Writer(pair.target, made.pair.models[1], made.recipe, folder / TEXTS)
    texts = writer.write("learned", [ids[:PROMPT_TOKENS] for ids in known])
    recipe, drafts = made.recipe, (pair.models[1], made.pair.models[1])
    shipped, trained = (measure_alpha(pair.target, each, texts, recipe, recipe.batch_size) for each in drafts)
    gain = estimate(trained, shipped)
    return f"after prompts that were trained on: {estimate(shipped)} shipped, {estimate(trained)} trained, gain {gain}"


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
    how: dict[str, Any] = {"loss": loss_name, "phases": phases, "texts_per_phase": texts_per_phase, "passes": passes}
    how |= {"learn_from_prompts": learn_from_prompts, "patience": phases, "training": {"bf16": True} if bf16 else {}}
    result = train(pair, draft, folder / "draft", **how, learning_rate=learning_rate, seed=seed)
    console.print(str(result), soft_wrap=True)
    console.print(on_learned_prompts(pair, result, folder / "draft"), soft_wrap=True)
    for rows in (1, 8) if speed else ():
        compare(pair, {"shipped draft": pair.models[1], "trained draft": result.pair.models[1]}, rows)


if __name__ == "__main__":
    typer.run(main)
