"""Train a draft with a tokenizer of its own for the target in the package, and measure it.

The tokenizer is a unigram model of 2,048 tokens. The draft starts as the target's first two layers, each embedding as
the mean of those of the target's tokens that spell it, and is distilled on the source of the Python standard library,
as for `train_pair.py`: where both texts have a boundary, its distribution among the common tokens is moved to the
target's. Interrupted runs continue from `--work`.

    python scripts/train_other_tokenizer.py --work build/other            # trains, unless it is done, and measures
"""

import itertools
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from train_pair import END, divergence, encode, fit, read, source_files, windows
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.drafting.other_tokenizer import Translation
from hf_specx.drafting.vocabulary_map import VocabularyMap, vocabulary_map


SIZE = 2048
WINDOW, ROWS, PEAK = 128, 4, 1e-3  # tokens of a window, windows of a step, learning rate
OF_TEXT = 0.1  # weight of the loss of the draft's own next token
PROMPT_TOKENS, NEW_TOKENS = 64, 128
console = Console()


def train_tokenizer(files: list[Path]) -> Tokenizer:
    """A unigram model over bytes, so that it encodes every text."""
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    unigram.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    unigram.train_from_iterator(
        read(files), trainers.UnigramTrainer(vocab_size=SIZE, special_tokens=[END], initial_alphabet=alphabet)
    )
    return unigram


def first_draft(target: PreTrainedModel, vocabularies: VocabularyMap) -> LlamaForCausalLM:
    """The target's first two layers, with an embedding for each token of the draft."""
    values = target.config.to_dict() | {"vocab_size": SIZE, "num_hidden_layers": 2, "layer_types": None}
    draft = LlamaForCausalLM(LlamaConfig(**values | {"eos_token_id": 0, "pad_token_id": None}))
    weights = target.state_dict()
    embeddings = weights.pop("model.embed_tokens.weight")
    weights.pop("lm_head.weight", None)
    draft.load_state_dict(weights, strict=False)
    own = draft.get_input_embeddings().weight
    with torch.no_grad():
        for number, content in enumerate(vocabularies.draft.contents):
            meant = vocabularies.to_target[number]
            spelled = [meant] if meant >= 0 else vocabularies.target.encode(content)
            own[number] = embeddings[spelled].mean(0)  # type: ignore[operator]
    return draft


def loss_of(target: Any, draft: Any, vocabularies: VocabularyMap, rows: torch.Tensor) -> torch.Tensor:
    """The divergence after each token of rows [R, L] of the target where the draft has a boundary as well.

    A little of the loss of the draft's own next token is added, so that it can also write texts alone.
    """
    texts, here, there = [], [], []
    for row, ids in enumerate(rows.tolist()):
        translation = Translation(vocabularies, vocabularies.to_draft)
        translation.extend(ids)
        settled = [(count, state[0]) for count, state in enumerate(translation.states) if state[0] and not state[1]]
        here += [(row, count - 1) for count, _ in settled]
        there += [(row, boundary - 1) for _, boundary in settled]
        texts.append(torch.tensor(translation.ids))
    with torch.no_grad():
        said = target(rows).logits[tuple(torch.tensor(here).T)]
    read = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)
    logits = draft(read.clamp(min=0)).logits
    own = vocabularies.logits(logits[tuple(torch.tensor(there).T)]).clamp(min=-50)
    return divergence(said, own) + OF_TEXT * F.cross_entropy(logits[:, :-1].flatten(0, 1), read[:, 1:].flatten())


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
    work: Annotated[Path, typer.Option(help="where the tokenizer and the draft are kept")] = Path("build/other"),
    steps: int = 1800,
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    trained_on, held_out = source_files()
    pair = DraftTargetPair.embedded()
    assert pair.tokenizer is not None
    path = work / "tokenizer.json"
    if not path.exists():
        train_tokenizer(trained_on).save(str(path))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END)
    vocabularies = vocabulary_map(pair.tokenizer, tokenizer, (pair.target.config.vocab_size, SIZE))
    console.print(f"overlap {vocabularies.overlap:.2f}, coverage of the sample text {vocabularies.coverage:.2f}")
    torch.manual_seed(0)
    draft = first_draft(pair.target, vocabularies)
    tokens = encode(pair.tokenizer, trained_on)  # type: ignore[arg-type]
    common = torch.isin(tokens, torch.tensor(vocabularies.to_target))
    console.print(f"coverage of the text {common.float().mean():.3f}")

    def loss(step: int) -> torch.Tensor:
        rows = windows(tokens, step, seed=3, length=WINDOW, count=ROWS)
        return loss_of(pair.target, draft, vocabularies, rows)

    for parameter in itertools.chain(pair.target.parameters()):
        parameter.requires_grad_(False)
    fit("other", draft, loss, steps, PEAK, work)
    draft.eval()
    draft.save_pretrained(work / "draft")
    tokenizer.save_pretrained(work / "draft")
    other = SpeculativeDecoding(draft, num_draft_tokens=4, tokenizer=pair.tokenizer, draft_tokenizer=tokenizer)
    measure(pair, other, encode(pair.tokenizer, held_out))  # type: ignore[arg-type]


if __name__ == "__main__":
    typer.run(main)
