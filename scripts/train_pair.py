"""Train the pair in `hf_specx/embedded/`: a tokenizer, a target, and a draft distilled from the target.

The text is the source of the Python standard library, which every machine with Python has.
Every stage is seeded and saves its result in `--work`; an interrupted run continues from there.

    python scripts/train_pair.py --work build/pair --out hf_specx/embedded
"""

import copy
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_specx import DraftTargetPair
from hf_specx.hub.folders import check_folder
from hf_specx.pair_files.pair_config import CONFIG_NAME, ModelSource, PairConfig


VOCAB_SIZE = 4096
CONTEXT = 512  # tokens in a training window
BATCH = 4  # windows in a step
END, PAD = "<|endoftext|>", "<|pad|>"
SKIPPED = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data", "lib2to3", "turtledemo"}
HELD_OUT = 20  # one file in this many is never trained on
NOTES = """## How it was made

`python scripts/train_pair.py --work build/pair --out {out}`

Data: the source of the Python {python} standard library without tests, `encodings`, `pydoc_data`, `lib2to3`,
`turtledemo` and installed packages ({files} files, {tokens:,} tokens); one file in 20, chosen by a hash of its path,
was held out ({held_out} files, from which the prompts are). Another Python version gives other weights.

The target saw {steps:,} steps of 2,048 tokens. The draft started as the target's first two layers and was distilled
for {draft_steps:,} steps by total variation plus a tenth of the forward KL divergence, on the text and on {samples}
samples of the target's own by turns. Both were trained on windows of 512 tokens.

The target is a Llama of 16 layers of 256 with 4 heads and feed-forwards of 704, the draft the same with 2 layers; the
vocabulary is a byte-level BPE whose `<|endoftext|>` ends a file. On the held-out files the target has a loss of
{target_loss:.2f} nats a token (perplexity {target_perplexity:.1f}), the draft {draft_loss:.2f}. α, the mean of
Σ min(p, q) where the target writes 128 tokens at temperature 1 after held-out prompts of 64 tokens, is
**{alpha:.3f}**. The command above prints these figures.

## Intended use

Demonstrations, tests and benchmarks of speculative sampling. It knows the style of the standard library and little
else: what it writes looks like Python and does nothing useful. The text it was trained on is under the PSF licence.
"""
console = Console()


def source_files() -> tuple[list[Path], list[Path]]:
    """The files of the standard library, split into (trained on, held out) by a hash of their relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f.relative_to(root) for f in sorted(root.rglob("*.py"))]
    files = [f for f in files if not SKIPPED & set(f.parts) and not f.name.startswith("_sysconfigdata")]
    held = [f for f in files if int(hashlib.sha256(f.as_posix().encode()).hexdigest(), 16) % HELD_OUT == 0]
    return [root / f for f in files if f not in set(held)], [root / f for f in held]


def read(files: list[Path]) -> Iterator[str]:
    return (f.read_text(encoding="utf-8", errors="replace") for f in files)


def train_tokenizer(files: list[Path]) -> Tokenizer:
    """A byte-level BPE, which encodes every text and decodes it to exactly the same text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        read(files),
        trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[END, PAD], initial_alphabet=alphabet),
    )
    return bpe


def encode(tokenizer: PreTrainedTokenizerFast, files: list[Path]) -> torch.Tensor:
    """The tokens of all files, each followed by the end token: [N]."""
    ids = [i for text in read(files) for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    return torch.tensor(ids)


def llama(num_hidden_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,  # set when they are saved; samples continue after the end of a file
        pad_token_id=1,
    )
    return LlamaForCausalLM(config)


def windows(tokens: torch.Tensor, step: int, seed: int, length: int = CONTEXT, count: int = BATCH) -> torch.Tensor:
    """The batch of a step, [count, length]; it depends on the seed and the step only, so a run can be resumed."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(tokens) - length, (count,), generator=generator)
    return torch.stack([tokens[s : s + length] for s in starts.tolist()])


def fit(
    name: str, model: LlamaForCausalLM, loss_of: Callable[[int], torch.Tensor], steps: int, peak: float, work: Path
) -> None:
    """Train with AdamW, a short warm-up and a linear decay to zero; saves a checkpoint every 200 steps."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    kept = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    checkpoint, first = work / f"{name}.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True, map_location=model.device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[loss]}")
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=steps, completed=first, loss="")
        average, started = math.nan, time.perf_counter()
        for step in range(first, steps):
            warm = min(1.0, (step + 1) / 100)
            for group in optimizer.param_groups:
                group["lr"] = peak * warm * (1 - step / steps)
            loss = loss_of(step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
            progress.update(task, completed=step + 1, loss=f"loss {average:.3f}")
            if (step + 1) % 200 == 0 or step + 1 == steps:
                console.print(f"{name} {step + 1}/{steps}: {average:.3f}, {time.perf_counter() - started:.0f} s")
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, checkpoint.with_suffix(".tmp"))
                checkpoint.with_suffix(".tmp").replace(checkpoint)


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16)


def train_target(tokens: torch.Tensor, steps: int, seed: int, work: Path, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = llama(16).to(device)  # type: ignore[arg-type]

    def loss_of(step: int) -> torch.Tensor:
        ids = windows(tokens, step, seed).to(device)
        with autocast(device):
            return model(ids, labels=ids).loss

    fit("target", model, loss_of, steps, 2e-3, work)
    return model.eval()


def write(target: LlamaForCausalLM, prompts: torch.Tensor, max_new_tokens: int, seed: int) -> torch.Tensor:
    """Sample continuations of prompts [B, L] at temperature 1, also after end tokens: [B, L + max_new_tokens]."""
    torch.manual_seed(seed)
    prompts = prompts.to(target.device)
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max_new_tokens, pad_token_id=1)
    written = target.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)  # type: ignore[misc]
    assert isinstance(written, torch.Tensor)
    return written


@torch.no_grad()
def own_samples(target: LlamaForCausalLM, tokens: torch.Tensor, pools: int, seed: int, work: Path) -> torch.Tensor:
    """Sample the target at temperature 1 after prompts of 64 tokens: [pools * 64, CONTEXT].

    In bfloat16, as the target is saved; each pool of 64 rows is saved once it is complete.
    """
    writer = copy.deepcopy(target).bfloat16()
    drawn = []
    for pool in range(pools):
        path = work / f"samples-{pool}.pt"
        if not path.exists():
            prompts = windows(tokens, pool, seed + 1, length=64, count=64)
            torch.save(write(writer, prompts, CONTEXT - 64, seed + pool).cpu(), path)
            console.print(f"samples {pool + 1}/{pools}")
        drawn.append(torch.load(path, weights_only=True))
    return torch.cat(drawn)


def divergence(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Total variation (one minus the acceptance) plus a tenth of the forward KL, whose gradient does not vanish."""
    log_p, log_q = target_logits.float().log_softmax(-1), draft_logits.float().log_softmax(-1)
    variation = 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    return (variation + 0.1 * F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)).mean()


def distil_draft(
    target: LlamaForCausalLM, tokens: torch.Tensor, samples: torch.Tensor, steps: int, seed: int, work: Path
) -> LlamaForCausalLM:
    """Train a draft that starts as the target's first two layers, on text and on the target's samples in turns."""
    draft = llama(2).to(target.device)  # type: ignore[arg-type]
    draft.load_state_dict(target.state_dict(), strict=False)

    def loss_of(step: int) -> torch.Tensor:
        rows = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed + step))[:BATCH]
        ids = samples[rows] if step % 2 else windows(tokens, step, seed + 2)
        ids = ids.to(target.device)
        with autocast(target.device):
            with torch.no_grad():
                target_logits = target(ids).logits
            return divergence(target_logits, draft(ids).logits)

    fit("draft", draft, loss_of, steps, 2e-3, work)
    return draft.eval()


@torch.no_grad()
def measure(target: LlamaForCausalLM, draft: LlamaForCausalLM, held_out: torch.Tensor, seed: int) -> dict[str, Any]:
    """Held-out loss of both models, and alpha: the mean of sum_x min(p, q) over samples after held-out prompts."""
    text = windows(held_out, 0, seed, count=64).to(target.device)
    losses = [torch.stack([m(x, labels=x).loss for x in text.split(8)]).mean().item() for m in (target, draft)]
    written = write(target, windows(held_out, 1, seed, length=64, count=64), 128, seed)
    alphas = []
    for rows in written.split(8):
        p, q = (m(rows).logits[:, 63:-1].float().softmax(-1) for m in (target, draft))
        alphas.append(torch.minimum(p, q).sum(-1).mean())
    return {
        "target_loss": losses[0],
        "target_perplexity": math.exp(losses[0]),
        "draft_loss": losses[1],
        "alpha": torch.stack(alphas).mean().item(),
    }


def demo_prompts(tokenizer: PreTrainedTokenizerFast, held_out: list[Path], count: int = 16) -> list[str]:
    """The first lines of functions in held-out files, of unequal length, at most 64 tokens."""
    prompts: list[str] = []
    for path, text in zip(held_out, read(held_out), strict=True):
        lines = text.splitlines(keepends=True)
        starts = [i for i, line in enumerate(lines) if line.lstrip().startswith("def ") and i > 20]
        if not starts:
            continue
        middle = starts[len(starts) // 2]
        wanted = 24 + 8 * (len(prompts) % 6)
        ids = tokenizer("".join(lines[middle : middle + 12]))["input_ids"][:wanted]
        if len(ids) == wanted:
            prompts.append(str(tokenizer.decode(ids)))
            console.print(f"prompt from {path.name}", style="dim")
    return prompts[:count]


def check_same_run(work: Path, arguments: dict[str, int]) -> None:
    """Raise an error if a folder has stages of a run with other arguments."""
    path = work / "arguments.json"
    if not path.exists():
        path.write_text(json.dumps(arguments))
    if json.loads(path.read_text()) != arguments:
        raise typer.BadParameter(f"{work} holds stages of a run with {path.read_text()}; name another --work.")


def main(
    work: Annotated[Path, typer.Option(help="where checkpoints and samples are kept")] = Path("build/pair"),
    out: Annotated[Path, typer.Option(help="where the finished pair is written")] = Path("hf_specx/embedded"),
    target_steps: int = 3400,
    draft_steps: int = 2600,
    pools: Annotated[int, typer.Option(help="batches of 64 samples drawn from the target")] = 10,
    seed: int = 0,
) -> None:
    is_pair = (out / CONFIG_NAME).is_file()  # nothing else is replaced
    check_folder(out, overwrite=is_pair)
    work.mkdir(parents=True, exist_ok=True)
    check_same_run(work, {"target_steps": target_steps, "draft_steps": draft_steps, "pools": pools, "seed": seed})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained_on, held_out = source_files()
    bpe = work / "tokenizer.json"
    if not bpe.exists():
        train_tokenizer(trained_on).save(str(bpe))
    special = {"eos_token": END, "pad_token": PAD, "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(bpe), **special)
    tokens, unseen = encode(tokenizer, trained_on), encode(tokenizer, held_out)
    console.print(f"{len(trained_on)} files, {len(tokens):,} tokens; held out {len(held_out)} files, {len(unseen):,}")

    target = train_target(tokens, target_steps, seed, work, device)
    samples = own_samples(target, tokens, pools, seed, work)
    draft = distil_draft(target, tokens, samples, draft_steps, seed, work)
    facts = measure(target, draft, unseen, seed)
    console.print_json(data=facts)
    for model in (target, draft):
        model.config.eos_token_id = model.generation_config.eos_token_id = 0
        model.bfloat16()
    facts |= {"files": len(trained_on), "tokens": len(tokens), "held_out": len(held_out), "steps": target_steps}
    facts |= {"draft_steps": draft_steps, "samples": 64 * pools, "python": platform.python_version(), "out": out}
    config = PairConfig(ModelSource(), ModelSource(), license="apache-2.0", notes=NOTES.format(**facts))
    config.prompts = demo_prompts(tokenizer, held_out)
    DraftTargetPair(target, draft, tokenizer, config).save_pretrained(out, overwrite=is_pair)


if __name__ == "__main__":
    typer.run(main)
