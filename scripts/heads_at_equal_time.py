"""New heads of each kind for the target in the package, after equal CPU time of training: which drafts best.

    OMP_NUM_THREADS=1 python scripts/heads_at_equal_time.py --work build/heads --minutes 7

The prompts are those of `train_pair.py`: source of the Python standard library, of which one file in 20 is held out.
All heads learn from the same texts, which are written first and not counted. A head is trained until its process has
taken so many minutes of CPU time; its learning rate falls with that time, not with steps, whose number nobody knows
before. Then a line of a table is printed: tokens a round on held-out prompts, with their 95% interval. Each pair is
saved in a folder of `--work`, for `specx bench`.
"""

import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from train_pair import PROMPT, READ, SAMPLED, WRITTEN, encode, read, source_files, windows
from transformers import TrainerCallback

from hf_specx import DraftHead, DraftTargetPair, distill
from hf_specx.training.head import INITIAL_STD, MARKOV_RANK, new_config
from hf_specx.training.recipe import RATES, TrainingRecipe


NUM_TEXTS, NUM_HELD_OUT, NUM_DRAFT_TOKENS = 768, 192, 4
WARM_UP_SHARE = 0.05  # of the time
MOST_PASSES = 1000  # more than there is time for


class UntilTime(TrainerCallback):
    """Ends a training after so many seconds of CPU time, towards which its learning rate falls to 0.

    Attributes:
        used: seconds so far.
    """

    def __init__(self, seconds: float):
        self.seconds, self.used = seconds, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any) -> None:
        self.start = time.process_time()
        lr_scheduler.lr_lambdas = [self.rate] * len(lr_scheduler.lr_lambdas)

    def rate(self, step: int) -> float:
        """The learning rate at this moment, as a share of the largest."""
        share = (time.process_time() - self.start) / self.seconds
        return min(share / WARM_UP_SHARE, 1.0) * max(0.0, 1 - share)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.used = time.process_time() - self.start
        control.should_training_stop = self.used >= self.seconds


@torch.no_grad()
def new_dflash2_head(target: Any, seed: int) -> DraftHead:
    """A head that begins as its makers have it: its convolutions change nothing, and its output is the target's."""
    vocab_size, recipe = target.config.vocab_size, TrainingRecipe(num_draft_tokens=NUM_DRAFT_TOKENS)
    config = new_config(target, "dspark", recipe, vocab_size, mask_token_id=vocab_size - 1)
    fields = {"kind": "dflash2", "block_size": NUM_DRAFT_TOKENS + 1, "sample_from_anchor": False, "markov_rank": 0}
    fields |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": MARKOV_RANK, "selector_top_k": 16}
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    head: Any = DraftHead(config).float()
    for name, weight in head.named_parameters():
        if name.endswith("base_kernel"):
            weight[:, 0] = 1  # and 0 for the positions before
        elif name.endswith("kernel_projection.weight"):
            weight.zero_()
        elif weight.ndim > 1:
            weight.normal_(std=INITIAL_STD)
    head.lm_head.weight.copy_(target.get_output_embeddings().weight)
    return head.requires_grad_(False).eval()


def main(
    work: Annotated[Path, typer.Option(help="where texts, checkpoints and pairs are put")] = Path("build/heads"),
    minutes: Annotated[float, typer.Option(help="of CPU time for each head")] = 7.0,
    kinds: Annotated[str, typer.Option(help="of heads, with commas between")] = "dspark,eagle3,dflash2",
    seed: int = 0,
) -> None:
    torch.set_num_threads(1)
    pair = DraftTargetPair.from_pretrained("embedded", dtype=torch.float32)
    target: Any = pair.target
    tokenizer: Any = pair.tokenizer
    target.config.eos_token_id = target.generation_config.eos_token_id = None  # texts go on after the end of a file
    trained_on, held_out = source_files()
    tokens, unseen = encode(tokenizer, read(trained_on)), encode(tokenizer, read(held_out))
    prompts = windows(tokens, 0, seed + 1, length=READ, count=NUM_TEXTS).tolist()
    unseen_prompts = windows(unseen, 1, seed, length=PROMPT, count=NUM_HELD_OUT).tolist()
    first = None
    print("| head | CPU time | steps | α | tokens a round |\n| --- | --- | --- | --- | --- |")
    for kind in kinds.split(","):
        folder, until = work / f"{kind}.training", UntilTime(60 * minutes)
        if first is None:
            first = folder
        else:
            shutil.copytree(first / "texts", folder / "texts", dirs_exist_ok=True)
            shutil.copy(first / "specx_distill.json", folder)  # or the folder is not known as one of a training
        result = distill(
            target,
            new_dflash2_head(target, seed) if kind == "dflash2" else kind,
            prompts,
            tokenizer=pair.tokenizer,
            held_out=unseen_prompts,
            folder=folder,
            callbacks=[until],
            num_draft_tokens=NUM_DRAFT_TOKENS,
            max_new_tokens=WRITTEN,
            phases=1,
            texts_per_phase=NUM_TEXTS,
            passes=MOST_PASSES,
            learning_rate=RATES["head"] / target.config.hidden_size,
            learn_from_prompts=True,
            seed=seed,
            training={"weight_decay": 0.1, "adam_beta2": 0.95},
            **SAMPLED,
        )
        figures = (f"{until.used / 60:.1f} minutes", result.steps, result.after, result.tokens_after)
        print(f"| `{kind}` | {' | '.join(map(str, figures))} |", flush=True)
        result.pair.save_pretrained(work / kind, overwrite=True)


if __name__ == "__main__":
    typer.run(main)
