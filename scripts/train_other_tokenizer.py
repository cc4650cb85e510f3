"""Train a draft with a tokenizer of its own for the target in the package, and measure it.

The tokenizer is a unigram model of the 2,048 tokens that the target's BPE uses most. The draft starts as the one in
the package with its embeddings of these tokens, and is trained by `hf_specx.distill` on what the target writes after
pieces of the Python standard library's source. Interrupted runs continue from `--work`.

    python scripts/train_other_tokenizer.py --work build/other            # trains, unless it is done, and measures
"""

import math
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from train_pair import END, encode, source_files, windows
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.drafting.vocabulary_map import VocabularyMap, vocabulary_map
from hf_specx.training.distill import distill


SIZE = 2048
TEXTS, PEAK = 64, 3e-4  # texts of a phase, learning rate
PROMPT_TOKENS, NEW_TOKENS = 64, 128
console = Console()


def most_used(tokenizer: PreTrainedTokenizerFast, tokens: torch.Tensor) -> Tokenizer:
    """A unigram model of the end token, all bytes and the tokens used most, by their share of `tokens` [N]."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    counts = torch.bincount(tokens, minlength=len(names)).tolist()
    others = [number for number, name in enumerate(names) if number not in tokenizer.all_special_ids]
    others.sort(key=lambda number: (len(names[number]) > 1, -counts[number]))
    pieces = [(names[number], math.log(max(counts[number], 0.5) / len(tokens))) for number in others[: SIZE - 1]]
    unigram = Tokenizer(models.Unigram([(END, 0.0), *pieces]))
    unigram.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    unigram.decoder = decoders.ByteLevel()
    return unigram


def first_draft(draft: PreTrainedModel, vocabularies: VocabularyMap) -> LlamaForCausalLM:
    """A draft with the target's tokenizer, with the embeddings of the tokens that the other one has as well."""
    values = draft.config.to_dict() | {"vocab_size": SIZE, "eos_token_id": 0, "pad_token_id": None, "dtype": "float32"}
    weights = draft.float().state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][vocabularies.to_target]
    found = LlamaForCausalLM(LlamaConfig(**values))
    found.load_state_dict(weights)
    return found


@torch.no_grad()
def measure(pair: DraftTargetPair, other: SpeculativeDecoding, held_out: torch.Tensor) -> None:
    """Print how drafts with the target's tokenizer and with another compare, each against plain sampling."""
    assert pair.tokenizer is not None
    own = SpeculativeDecoding(pair.draft, num_draft_tokens=4)
    by_text = SpeculativeDecoding(
        other.draft_model,
        num_draft_tokens=4,
        tokenizer=other.tokenizer,
        draft_tokenizer=other.draft_tokenizer,
        tokenizer_match="text",
    )
    target: Any = pair.target
    ways = {"plain": None, "same tokenizer": own, "another, by tokens": other, "another, by text": by_text}
    for rows in (1, 8):
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        counts: dict[str, list[float]] = {name: [0.0] * 4 for name in ways}
        for turn in range(5 if rows == 1 else 2):
            prompts = windows(held_out, turn, seed=11, length=PROMPT_TOKENS, count=rows)
            inputs = {"inputs": prompts, "attention_mask": torch.ones_like(prompts)}
            options = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
            for name, strategy in ways.items():
                torch.manual_seed(turn)
                started = time.perf_counter()
                texts = target.generate(**inputs, **options, custom_generate=strategy)
                seconds[name].append(time.perf_counter() - started)
                if strategy is None or strategy.report is None:
                    continue
                report, new = strategy.report, texts[:, PROMPT_TOKENS:]
                size = len(str(pair.tokenizer.decode(new.flatten().tolist())).encode()) / new.numel()
                found = report.overlap, report.judged, size * report.accepted, sum(report.rounds_per_row)
                counts[name] = [a + b for a, b in zip(counts[name], found, strict=True)]
        for name, strategy in ways.items():
            ratios = [plain / own for plain, own in zip(seconds["plain"], seconds[name], strict=True)]
            alpha, judged, size, rounds = counts[name]
            told = f"{rows} rows, {name}: {statistics.median(ratios):.2f} times plain"
            if judged:
                told += f", alpha {alpha / judged:.3f}, {size / rounds:.2f} bytes accepted a round"
            console.print(told)
            if strategy is not None and strategy.report is not None:
                console.print(str(strategy.report), style="dim")


def main(
    work: Annotated[Path, typer.Option(help="where the texts, checkpoints and the draft are kept")] = Path(
        "build/other"
    ),
    phases: Annotated[int, typer.Option(help="in each of which the target writes 64 texts")] = 30,
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    trained_on, held_out = source_files()
    pair = DraftTargetPair.embedded()
    assert pair.tokenizer is not None
    assert isinstance(pair.draft, PreTrainedModel)
    tokens = encode(pair.tokenizer, trained_on)  # type: ignore[arg-type]
    own: Any = pair.tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=most_used(own, tokens), eos_token=END)
    vocabularies = vocabulary_map(own, tokenizer, (pair.target.config.vocab_size, SIZE))
    console.print(f"overlap {vocabularies.overlap:.2f}, coverage of the sample text {vocabularies.coverage:.2f}")
    common = torch.isin(tokens, torch.tensor(vocabularies.to_target))
    console.print(f"coverage of the text {common.float().mean():.3f}")
    unseen = encode(own, held_out)
    result = distill(
        pair.target,
        first_draft(pair.draft, vocabularies),
        windows(tokens, 0, seed=3, length=PROMPT_TOKENS, count=TEXTS * phases).tolist(),
        tokenizer=own,
        draft_tokenizer=tokenizer,
        held_out=windows(unseen, 1, seed=3, length=PROMPT_TOKENS, count=128).tolist(),
        folder=work / "training",
        max_new_tokens=NEW_TOKENS,
        phases=phases,
        patience=phases,
        texts_per_phase=TEXTS,
        learning_rate=PEAK,
    )
    console.print(str(result))
    draft: Any = result.pair.draft
    draft.save_pretrained(work / "draft")
    tokenizer.save_pretrained(work / "draft")
    other = SpeculativeDecoding(draft, num_draft_tokens=4, tokenizer=own, draft_tokenizer=tokenizer)
    measure(DraftTargetPair.embedded(), other, unseen)


if __name__ == "__main__":
    typer.run(main)
