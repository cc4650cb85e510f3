"""Train a head for an early exit of the target in the package, and time drafting with its first layers.

The head is a linear map between the target's final norm and its output head; it is saved with the target as a pair, in
a file of its own, and the target is not changed. The text is the source of the Python standard library, as for
`train_pair.py`. Three minutes on one core.

    python scripts/train_exit.py --out build/exit-2        # trains, unless the pair is there already
    python scripts/train_exit.py --pair grafted-163M       # a synthetic target whose first layers predict: times only
"""

import itertools
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from torch import nn
from train_pair import encode, source_files, windows
from transformers import PreTrainedModel

from hf_specx import DraftTargetPair, EarlyExitDraft, SpeculativeDecoding
from hf_specx.measure.contenders import Contender, stock_settings
from hf_specx.measure.inputs import BenchPair, Inputs, load_bench_pair
from hf_specx.measure.timer import Timer, speedups
from hf_specx.training.losses import total_variation


WINDOW, ROWS, PEAK, WARM_UP = 128, 4, 2e-3, 20  # tokens of a window, windows of a step, learning rate, steps to it
PROMPT_TOKENS = 32
console = Console()


def linear_head(target: PreTrainedModel) -> nn.Linear:
    """A map from hidden states to hidden states that changes nothing as yet."""
    width = target.config.hidden_size
    head = nn.Linear(width, width, bias=False, dtype=target.dtype).eval()
    nn.init.eye_(head.weight)
    return head


def divergence(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Total variation (one minus the acceptance) plus a tenth of the forward KL, whose gradient does not vanish."""
    p, log_q = target_logits.float().softmax(-1), draft_logits.float().log_softmax(-1)
    forward_kl = nn.functional.kl_div(log_q, p, reduction="none").sum(-1)
    return (total_variation(p, log_q) + 0.1 * forward_kl).mean()


def train(target: PreTrainedModel, exit_layer: int, tokens: torch.Tensor, steps: int) -> nn.Linear:
    """Fit the head so that what the first layers say is close to what the target says, by `divergence`."""
    head, output = linear_head(target), target.get_output_embeddings()
    first = EarlyExitDraft(exit_layer).first_layers(target).base_model
    optimizer = torch.optim.AdamW(head.parameters(), lr=PEAK, betas=(0.9, 0.95))
    started = time.perf_counter()
    for step in range(steps):
        ids = windows(tokens, step, seed=1, length=WINDOW, count=ROWS)
        with torch.no_grad():
            said, hidden = target(ids).logits, first(ids).last_hidden_state
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
        loss = divergence(said, output(head(hidden)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49:
            console.print(f"step {step + 1}: loss {loss.item():.3f}, {time.perf_counter() - started:.0f} s")
    return head


@torch.no_grad()
def acceptance(target: PreTrainedModel, draft: EarlyExitDraft, tokens: torch.Tensor) -> float:
    """The mean of sum_x min(p, q) on text that was not trained on, at temperature 1."""
    ids = windows(tokens, 0, seed=7, length=WINDOW, count=8)
    p, q = (model(ids).logits.float().softmax(-1) for model in (target, draft.first_layers(target)))
    return float(torch.minimum(p, q).sum(-1).mean())


class StockExit(Contender):
    """transformers' own early exit; `number` of candidates a round, None for its defaults. Batch size 1 only."""

    def __init__(self, target: PreTrainedModel, exit_layer: int, number: int | None):
        super().__init__("plain", target)
        self.exit_layer, self.number = exit_layer, number

    def __call__(self, inputs: Inputs, options: dict[str, Any]) -> torch.Tensor:
        """Generate: [B, L + N] int64."""
        with stock_settings(self.target, self.number):
            return self.target.generate(**inputs, **options, assistant_early_exit=self.exit_layer)  # type: ignore[operator]


def compare(pair: BenchPair, draft: EarlyExitDraft, rows: int, sampled: bool, turns: int, new_tokens: int) -> None:
    """Print how many times as fast as plain `generate` each is, and ours as transformers' own; medians of turns."""
    target, seeds = pair.target, list(range(turns))

    def make(name: str) -> Contender:
        if name == "plain":
            return Contender(name, target)
        kind, number = name.split("-")
        if kind == "transformers":
            return StockExit(target, draft.exit_layer, None if number == "defaults" else int(number))
        number_of = number if number == "auto" else int(number)
        return Contender(name, target, strategy=SpeculativeDecoding(draft, num_draft_tokens=number_of))

    stock = ["transformers-defaults", "transformers-3", "transformers-5"] if rows == 1 else []
    names = ["plain", *stock, "ours-auto", "ours-3", "ours-5"]
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": sampled}
    options |= {"top_k": 0, "pad_token_id": 0} if sampled else {"pad_token_id": 0}
    batches = [pair.inputs(rows, PROMPT_TOKENS + turn, new_tokens, turn) for turn in seeds]
    found = Timer(make, batches, options, seeds).time(names)
    console.print(f"{pair.name}, exit {draft.exit_layer}, batch {rows}, {'sampled' if sampled else 'greedy'}:")
    for name in names:
        rates = found[name].rates
        shown = f"  {name}: {statistics.median(speedups(rates, found['plain'].rates)):.2f} of plain"
        if stock and name.startswith("ours"):
            each = [speedups(rates, found[x].rates) for x in stock]
            shown += ", of transformers' own " + " ".join(f"{statistics.median(one):.2f}" for one in each)
        reports = found[name].reports
        rate = statistics.mean(report.acceptance_rate for report in reports) if reports else None
        console.print(shown + ("" if rate is None else f", acceptance {rate:.2f}"))


def pair_with_a_head(out: Path, exit_layer: int, steps: int) -> EarlyExitDraft:
    """The exit of the pair in a folder, with the target in the package; trained and saved first if there is none."""
    trained_on, held_out = source_files()
    if not out.exists():
        made = DraftTargetPair.embedded()
        target, tokenizer = made.target.float().requires_grad_(False), cast(Any, made.tokenizer)
        head = train(target, exit_layer, encode(tokenizer, trained_on[::6]), steps)
        out.parent.mkdir(parents=True, exist_ok=True)
        DraftTargetPair(target, EarlyExitDraft(exit_layer, head=head), tokenizer).save_pretrained(out)
    pair = DraftTargetPair.from_pretrained(out)
    assert isinstance(pair.draft, EarlyExitDraft)
    unseen = encode(cast(Any, pair.tokenizer), held_out[:8])
    without, with_it = (
        acceptance(pair.target, draft, unseen) for draft in (EarlyExitDraft(pair.draft.exit_layer), pair.draft)
    )
    console.print(f"exit {pair.draft.exit_layer}: alpha {without:.3f} without the head, {with_it:.3f} with it")
    return pair.draft


def main(
    pair: Annotated[str, typer.Option(help="embedded, or a synthetic one by the names of specx bench")] = "embedded",
    exit_layer: int = 2,
    out: Annotated[Path, typer.Option(help="the embedded target with its exit, a pair")] = Path("build/exit-2"),
    steps: int = 300,
    batch: Annotated[list[int] | None, typer.Option(help="rows, 1 and 8 if not given")] = None,
    turns: int = 7,
    new_tokens: int = 64,
) -> None:
    draft = pair_with_a_head(out, exit_layer, steps) if pair == "embedded" else EarlyExitDraft(exit_layer)
    measured = load_bench_pair(pair, "float32", lambda name, dtype: DraftTargetPair.from_pretrained(name, dtype=dtype))
    for rows, sampled in itertools.product(batch or (1, 8), (False, True)):
        compare(measured, draft, rows, sampled, turns, new_tokens)


if __name__ == "__main__":
    typer.run(main)
