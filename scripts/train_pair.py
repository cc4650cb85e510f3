"""Train the pair in `hf_specx/hub/embedded/`: a tokenizer, a target, and a head by `hf_specx.distill`.

The text is the source of the Python standard library, which every machine with Python has.
Every stage is seeded and saves its result in `--work`; an interrupted run continues from there.

    python scripts/train_pair.py --work build/pair --out hf_specx/hub/embedded
    python scripts/train_pair.py --work build/more --start hf_specx/hub/embedded --out build/better  # its draft
    python scripts/train_pair.py --work build/head --start hf_specx/hub/embedded --out build/better --draft eagle3

With --topics the text is English documentation, `pydoc_data.topics`, one topic in two held out, and the target is
trained on it first: a target that was fine-tuned on text of another kind, and a draft for it.

    python scripts/train_pair.py --topics --work build/t --start hf_specx/hub/embedded --out build/tuned --draft dspark
"""

import hashlib
import platform
import shlex
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from pydoc_data import topics as documentation
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_specx import DraftTargetPair
from hf_specx.common.drafts import NEW_HEADS, PAIR_CONFIG_NAME
from hf_specx.hub.folders import check_folder
from hf_specx.hub.pair_config import ModelSource, PairConfig
from hf_specx.training.distill import distill
from hf_specx.training.result import Distilled


VOCAB_SIZE = 4096
CONTEXT = 512  # tokens in a training window
BATCH = 4  # windows in a step
STEPS, RATE = 3400, 2e-3  # of a new target
MORE_STEPS, MORE_RATE = 300, 5e-4  # of one that is fine-tuned
END, PAD = "<|endoftext|>", "<|pad|>"
SKIPPED = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data", "lib2to3", "turtledemo"}
HELD_OUT = 20  # one file in this many is never trained on
READ, WRITTEN = 192, 64  # tokens of a text that the draft learns from: of a file, and of the target after these
PROMPT = 64  # tokens of a held-out prompt
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}  # not as its config says
NOTES = """## How it was made

`{command}`

Data: the source of the Python {python} standard library without tests, `encodings`, `pydoc_data`, `lib2to3`,
`turtledemo` and installed packages ({files} files, {tokens:,} tokens); one file in 20, chosen by a hash of its path,
was held out ({held_out} files, from which the prompts are). Another Python version gives other weights.

The target, a Llama of 16 layers of 256, saw {steps:,} steps of 2,048 tokens. On the held-out files it has a loss of
{target_loss:.2f} nats a token.

{draft}

## Intended use

Demonstrations, tests and benchmarks of speculative sampling. It knows the style of the standard library and little
else: what it writes looks like Python and does nothing useful. The text it was trained on is under the PSF licence.
"""


def source_files() -> tuple[list[Path], list[Path]]:
    """The files of the standard library, split into (trained on, held out) by a hash of their relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f.relative_to(root) for f in sorted(root.rglob("*.py"))]
    files = [f for f in files if not SKIPPED & set(f.parts) and not f.name.startswith("_sysconfigdata")]
    held_out = [f for f in files if int(hashlib.sha256(f.as_posix().encode()).hexdigest(), 16) % HELD_OUT == 0]
    return [root / f for f in files if f not in set(held_out)], [root / f for f in held_out]


def read(files: list[Path]) -> Iterator[str]:
    return (f.read_text(encoding="utf-8", errors="replace") for f in files)


def new_tokenizer(files: list[Path], work: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE, which encodes every text and decodes it to exactly the same; kept in a folder."""
    file = work / "tokenizer.json"
    if not file.exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        how: Any = {"vocab_size": VOCAB_SIZE, "special_tokens": [END, PAD], "initial_alphabet": alphabet}
        bpe.train_from_iterator(read(files), trainers.BpeTrainer(**how))
        bpe.save(str(file))
    return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=END, pad_token=PAD, padding_side="left")


def encode(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> torch.Tensor:
    """The tokens of all texts, each followed by the end token: [N]."""
    ids = [i for text in texts for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    return torch.tensor(ids)


def new_target() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=16,
        num_attention_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,  # set when they are saved; samples continue after the end of a file
        pad_token_id=1,
    )
    return LlamaForCausalLM(config)


def windows(tokens: torch.Tensor, number: int, seed: int, length: int = CONTEXT, count: int = 1) -> torch.Tensor:
    """Pieces of the text, [count, length]; they depend on the seed and a number only, so a run can be resumed."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    starts = torch.randint(0, len(tokens) - length, (count,), generator=generator)
    return torch.stack([tokens[s : s + length] for s in starts.tolist()])


def train_target(model: Any, tokens: torch.Tensor, seed: int, work: Path, steps: int, rate: float) -> None:
    """On pieces of the text, in mixed precision, by transformers' Trainer from its last checkpoint on."""
    data: Any = [dict.fromkeys(("input_ids", "labels"), windows(tokens, n, seed)[0]) for n in range(BATCH * steps)]
    how: dict[str, Any] = {"learning_rate": rate, "warmup_steps": steps // 30, "weight_decay": 0.1, "adam_beta2": 0.95}
    how |= {"save_steps": 200, "save_total_limit": 1, "report_to": "none", "use_cpu": not torch.cuda.is_available()}
    how |= {"per_device_train_batch_size": BATCH, "bf16": True, "seed": seed, "max_steps": steps}
    folder = work / "target"
    trainer = Trainer(model, TrainingArguments(str(folder), **how), train_dataset=data)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False).eval()  # no longer in mixed precision


def distil_draft(
    target: LlamaForCausalLM, draft: Any, tokens: torch.Tensor, unseen: torch.Tensor, work: Path, **options: Any
) -> Distilled:
    """Train on pieces of the text and on what the target writes after them, also after the end of a file."""
    seed, bf16 = options["seed"], options.pop("bf16")
    return distill(
        target,
        draft,
        windows(tokens, 0, seed + 1, length=READ, count=options["texts_per_phase"] * options["phases"]).tolist(),
        held_out=windows(unseen, 1, seed, length=PROMPT, count=256).tolist(),
        folder=work / "draft",
        command=shlex.join(["python", *sys.argv]),
        num_draft_tokens=4,
        max_new_tokens=WRITTEN,
        patience=options["phases"],
        learn_from_prompts=True,
        **SAMPLED,
        training={"weight_decay": 0.1, "adam_beta2": 0.95} | ({"bf16": True} if bf16 else {}),
        **options,
    )


@torch.no_grad()
def loss(model: LlamaForCausalLM, held_out: torch.Tensor, seed: int) -> float:
    """Nats a token on text that was not trained on."""
    text = windows(held_out, 0, seed, count=64).to(model.device)
    return torch.stack([model(x, labels=x).loss for x in text.split(8)]).mean().item()


def demo_prompts(tokenizer: PreTrainedTokenizerFast, held_out: list[Path], count: int = 16) -> list[str]:
    """The first lines of functions in held-out files, of unequal length, at most 64 tokens."""
    prompts: list[str] = []
    for text in read(held_out):
        lines = text.splitlines(keepends=True)
        starts = [i for i, line in enumerate(lines) if line.lstrip().startswith("def ") and i > 20]
        if not starts:
            continue
        middle = starts[len(starts) // 2]
        wanted = 24 + 8 * (len(prompts) % 6)
        ids = tokenizer("".join(lines[middle : middle + 12]))["input_ids"][:wanted]
        if len(ids) == wanted:
            prompts.append(str(tokenizer.decode(ids)))
    return prompts[:count]


def main(
    work: Annotated[Path, typer.Option(help="what one run has made so far; it goes on")] = Path("build/pair"),
    out: Annotated[Path, typer.Option(help="where the finished pair is written")] = Path("hf_specx/hub/embedded"),
    start: Annotated[Path | None, typer.Option(help="a pair whose target is kept and whose draft goes on")] = None,
    topics: Annotated[bool, typer.Option("--topics", help="text of another kind")] = False,
    phases: Annotated[int, typer.Option(help="of distillation")] = 10,
    texts_per_phase: Annotated[int, typer.Option(help="that the target writes in each")] = 512,
    passes: Annotated[int, typer.Option(help="how often a text is trained on")] = 6,
    seed: int = 0,
    draft: Annotated[str | None, typer.Option(help="eagle3 or dspark, a new head; else as anywhere")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="else as distill takes it")] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="the draft in mixed precision, faster on some CPUs")] = False,
) -> None:
    is_pair = (out / PAIR_CONFIG_NAME).is_file()  # nothing else is replaced
    check_folder(out, overwrite=is_pair)
    work.mkdir(parents=True, exist_ok=True)
    trained_on, held_out = source_files()
    texts, others = read(trained_on), read(held_out)
    if topics:
        pages = [documentation.topics[name] for name in sorted(documentation.topics)]
        texts, others = iter(pages[::2]), iter(pages[1::2])
    is_new = draft in NEW_HEADS or (draft or "").startswith("layers:")
    how: dict[str, Any] = {"draft": None if is_new else draft, "dtype": torch.float32}
    pair = None if start is None else DraftTargetPair.from_pretrained(start, **how)
    tokenizer: Any = new_tokenizer(trained_on, work) if pair is None else pair.tokenizer
    tokens, unseen = encode(tokenizer, texts), encode(tokenizer, others)
    print(f"{len(tokens):,} tokens; {len(unseen):,} held out")

    torch.manual_seed(seed)
    target: Any = new_target() if pair is None else pair.target
    if pair is None or topics:
        steps, rate = (STEPS, RATE) if pair is None else (MORE_STEPS, MORE_RATE)
        train_target(target, tokens, seed, work, steps, rate)
    target.config.eos_token_id = target.generation_config.eos_token_id = None  # texts go on after the end of a file
    start_from: Any = draft if is_new else "eagle3" if pair is None else pair.draft
    how = {"phases": phases, "texts_per_phase": texts_per_phase, "passes": passes, "learning_rate": learning_rate}
    distilled = distil_draft(target, start_from, tokens, unseen, work, **how, seed=seed, bf16=bf16)
    print(str(distilled))
    notes: str = distilled.pair.config.notes
    trained: Any = distilled.pair.draft
    facts: dict[str, Any] = {"target_loss": loss(target, unseen, seed)}
    for model in (target, trained):
        if model.can_generate():
            model.config.eos_token_id = model.generation_config.eos_token_id = 0
        model.bfloat16()
    if pair is None:
        facts |= {"files": len(trained_on), "tokens": len(tokens), "held_out": len(held_out), "steps": STEPS}
        facts |= {"draft": notes, "python": platform.python_version(), "command": shlex.join(["python", *sys.argv])}
        config = PairConfig(ModelSource(), ModelSource(), license="apache-2.0", notes=NOTES.format(**facts))
        config.prompts = demo_prompts(tokenizer, held_out)
    else:
        before, mark, tail = pair.config.notes.partition("## Intended use")
        more = notes if is_new else notes.replace("draft was made", "draft was trained further")
        notes = f"{before}{more}\n\n{mark}{tail}"
        config = replace(pair.config, draft=distilled.pair.config.draft, notes=notes, measurements=[])
        if topics:
            config.prompts = tokenizer.batch_decode(windows(unseen, 2, seed, PROMPT, 16))
    DraftTargetPair(target, trained, tokenizer, config).save_pretrained(out, overwrite=is_pair)


if __name__ == "__main__":
    typer.run(main)
