"""Train the pair in `hf_specx/embedded/`: a tokenizer, a target, and a draft by `hf_specx.distill`.

The text is the source of the Python standard library, which every machine with Python has.
Every stage is seeded and saves its result in `--work`; an interrupted run continues from there.

    python scripts/train_pair.py --work build/pair --out hf_specx/embedded
    python scripts/train_pair.py --work build/more --start hf_specx/embedded --out build/better     # its draft alone
"""

import hashlib
import json
import math
import platform
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_specx import DraftTargetPair
from hf_specx.hub.folders import check_folder
from hf_specx.pair_files.pair_config import CONFIG_NAME, ModelSource, PairConfig
from hf_specx.training.distill import distill
from hf_specx.training.held_out import estimate, measure_alpha
from hf_specx.training.recipe import TrainingRecipe
from hf_specx.training.result import Distilled
from hf_specx.training.texts import Writer


VOCAB_SIZE = 4096
CONTEXT = 512  # tokens in a training window
BATCH = 4  # windows in a step
END, PAD = "<|endoftext|>", "<|pad|>"
SKIPPED = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data", "lib2to3", "turtledemo"}
HELD_OUT = 20  # one file in this many is never trained on
READ, WRITTEN = 320, 64  # tokens of a text that the draft learns from: of a file, and of the target after these
PROMPT, MEASURED = 64, 128  # tokens of a held-out prompt, and of what the target writes after it to measure α
TEXTS = 512  # of a phase of distillation
NOTES = """## How it was made

`{command}`

Data: the source of the Python {python} standard library without tests, `encodings`, `pydoc_data`, `lib2to3`,
`turtledemo` and installed packages ({files} files, {tokens:,} tokens); one file in 20, chosen by a hash of its path,
was held out ({held_out} files, from which the prompts are). Another Python version gives other weights.

The target saw {steps:,} steps of 2,048 tokens. It is a Llama of 16 layers of 256 with 4 heads and feed-forwards of
704, the draft the same with 2 layers; the vocabulary is a byte-level BPE whose `<|endoftext|>` ends a file. On the
held-out files the target has a loss of {target_loss:.2f} nats a token (perplexity {target_perplexity:.1f}), the draft
{draft_loss:.2f}. The command above prints these figures.

{draft}

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


def new_tokenizer(files: list[Path], work: Path) -> PreTrainedTokenizerFast:
    """It is kept in a folder, and read from there the next time."""
    file = work / "tokenizer.json"
    if not file.exists():
        train_tokenizer(files).save(str(file))
    return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=END, pad_token=PAD, padding_side="left")


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


def distil_draft(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM | str,
    tokens: torch.Tensor,
    unseen: torch.Tensor,
    phases: int,
    passes: int,
    seed: int,
    bf16: bool,
    work: Path,
    command: str,
) -> Distilled:
    """Train on pieces of the text and on what the target writes after them, also after the end of a file."""
    return distill(
        target,
        draft,
        windows(tokens, 0, seed + 1, length=READ, count=TEXTS * phases).tolist(),
        held_out=windows(unseen, 1, seed, length=PROMPT, count=256).tolist(),
        folder=work / "draft",
        command=command,
        loss="total_variation",
        max_new_tokens=WRITTEN,
        phases=phases,
        texts_per_phase=TEXTS,
        passes=passes,
        patience=phases,
        learn_from_prompts=True,
        learning_rate=2e-3 if isinstance(draft, str) else 1e-3,
        seed=seed,
        training={"weight_decay": 0.1, "adam_beta2": 0.95} | ({"bf16": True} if bf16 else {}),
    )


def held_out_alpha(
    target: LlamaForCausalLM, drafts: dict[str, Any], made: Distilled, seed: int, work: Path
) -> dict[str, str]:
    """α of each draft on longer texts than those of the training, and what the second has more than the first."""
    recipe = TrainingRecipe(max_new_tokens=MEASURED, seed=seed)
    texts = Writer(target, made.pair.models[1], recipe, work / "measured").write("test", made.split.test)
    sums = {name: measure_alpha(target, draft, texts, recipe, BATCH) for name, draft in drafts.items()}
    found = {name: str(estimate(each)) for name, each in sums.items()}
    before, *rest = sums.values()
    return found | {"gain": str(estimate(rest[0], before))} if rest else found


@torch.no_grad()
def loss(model: LlamaForCausalLM, held_out: torch.Tensor, seed: int) -> float:
    """Nats a token on text that was not trained on."""
    text = windows(held_out, 0, seed, count=64).to(model.device)
    return torch.stack([model(x, labels=x).loss for x in text.split(8)]).mean().item()


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


def endless(model: Any) -> Any:
    """A model that goes on after the end of a file, as those do that are trained here."""
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def check_same_run(work: Path, arguments: dict[str, Any]) -> None:
    """Raise an error if a folder has stages of a run with other arguments."""
    path = work / "arguments.json"
    if not path.exists():
        path.write_text(json.dumps(arguments))
    if json.loads(path.read_text()) != arguments:
        raise typer.BadParameter(f"{work} holds stages of a run with {path.read_text()}; name another --work.")


def main(
    work: Annotated[Path, typer.Option(help="where checkpoints and texts are kept")] = Path("build/pair"),
    out: Annotated[Path, typer.Option(help="where the finished pair is written")] = Path("hf_specx/embedded"),
    start: Annotated[Path | None, typer.Option(help="a pair whose target is kept and whose draft goes on")] = None,
    target_steps: int = 3400,
    phases: Annotated[int, typer.Option(help=f"of distillation; in each the target writes {TEXTS} texts")] = 10,
    passes: Annotated[int, typer.Option(help="how often a text is trained on")] = 6,
    seed: int = 0,
    bf16: Annotated[bool, typer.Option("--bf16", help="the draft in mixed precision, faster on some CPUs")] = False,
) -> None:
    is_pair = (out / CONFIG_NAME).is_file()  # nothing else is replaced
    check_folder(out, overwrite=is_pair)
    work.mkdir(parents=True, exist_ok=True)
    arguments = {"start": start and str(start), "target_steps": target_steps, "phases": phases, "passes": passes}
    check_same_run(work, arguments | {"seed": seed, "bf16": bf16})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained_on, held_out = source_files()
    pair = None if start is None else DraftTargetPair.from_pretrained(start, dtype=torch.float32)
    tokenizer: Any = new_tokenizer(trained_on, work) if pair is None else pair.tokenizer
    tokens, unseen = encode(tokenizer, trained_on), encode(tokenizer, held_out)
    console.print(f"{len(trained_on)} files, {len(tokens):,} tokens; held out {len(held_out)} files, {len(unseen):,}")

    target = train_target(tokens, target_steps, seed, work, device) if pair is None else endless(pair.target)
    start_from: Any = "layers:2" if pair is None else endless(pair.models[1])
    command = shlex.join(["python", *sys.argv])
    made = distil_draft(target, start_from, tokens, unseen, phases, passes, seed, bf16, work, command)
    draft: Any = made.pair.draft
    facts: dict[str, Any] = {"target_loss": loss(target, unseen, seed), "draft_loss": loss(draft, unseen, seed)}
    facts |= {"target_perplexity": math.exp(facts["target_loss"])}
    first = {} if pair is None else {"alpha_before": pair.models[1]}
    facts |= held_out_alpha(target, first | {"alpha": draft}, made, seed, work)
    console.print_json(data=facts)
    for model in (target, draft):
        model.config.eos_token_id = model.generation_config.eos_token_id = 0
        model.bfloat16()
    if pair is None:
        facts |= {"files": len(trained_on), "tokens": len(tokens), "held_out": len(held_out), "steps": target_steps}
        facts |= {"draft": made.pair.config.notes, "python": platform.python_version(), "command": command}
        config = PairConfig(ModelSource(), ModelSource(), license="apache-2.0", notes=NOTES.format(**facts))
        config.prompts = demo_prompts(tokenizer, held_out)
    else:
        head, mark, tail = pair.config.notes.partition("## Intended use")
        more = made.pair.config.notes.replace("## How the draft was made", "## How the draft was trained further")
        config = replace(pair.config, notes=f"{head}{more}\n\n{mark}{tail}", measurements=[])
    DraftTargetPair(target, draft, tokenizer, config).save_pretrained(out, overwrite=is_pair)


if __name__ == "__main__":
    typer.run(main)
