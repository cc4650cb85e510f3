"""Heads whose files are misread: what is accepted of them, and how often a report names the right or a wrong option.

    OMP_NUM_THREADS=1 python scripts/misread_heads.py --work build/misread

Four heads are trained for the target in the package, each for some hundred steps, on source of the Python standard
library. Their files are written as other producers write them, and read as they are meant and as they once were read.
The first table has tokens a round of both. The second one has calls in which the report says that a head is misread:
false alarms with files as they are, and power with a fault put in.
"""

import json
import math
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics as documentation
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from train_pair import PROMPT, READ, SAMPLED, WRITTEN, encode, read, source_files, windows

from hf_specx import DraftHead, DraftTargetPair, SpeculativeDecoding, distill
from hf_specx.drafting.heads import formats
from hf_specx.training.head import INITIAL_STD, new_config
from hf_specx.training.recipe import TrainingRecipe


NUM_TEXTS, NUM_HELD_OUT, NUM_DRAFT_TOKENS = 256, 32, 4
ROWS, NEW_TOKENS = 8, 32  # of a call
CALLS = 12  # for each number of the first table
WINDOW = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "sliding_window": 32}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {  # the kind of each head that is trained, and its other fields
    "eagle3": ("eagle3", {"norm_before_residual": False}),
    "eagle3.1": ("eagle3", {"norm_before_residual": False, "fc_norm": True, "norm_output": True}),
    "dspark": ("dspark", {"block_size": NUM_DRAFT_TOKENS + 1, "sample_from_anchor": False}),
    "dflash": (
        "dspark",
        WINDOW
        | {"kind": "dflash", "block_size": NUM_DRAFT_TOKENS + 1, "sample_from_anchor": False, "markov_rank": 0}
        | {"sliding_window_non_causal": True, "mask_embedding": True},
    ),
}
Config = dict[str, Any]
Weights = dict[str, torch.Tensor]


@dataclass
class Misreading:
    """A head in files of some producer, and how these were read before.

    Attributes:
        head: one of `HEADS`.
        write: changes its config and tensors into those of the producer.
        loading: options by which it is read as before.
        change: the same by a change of what was loaded, where no option says it.
        in_halves: the same where channels that turn in pairs are read as halves.
    """

    head: str
    write: Callable[[Config, Weights], None]
    loading: dict[str, Any] = field(default_factory=dict)
    change: Callable[[DraftHead], None] | None = None
    in_halves: bool = False


def without_layout(config: Config, weights: Weights) -> None:
    """As speculators wrote DSpark before there was a layout from the anchor."""
    del config["sample_from_anchor"]


def with_rotary_factor(config: Config, weights: Weights) -> None:
    """As heads have it from the config of their target, whose layers in training ignored it."""
    config["transformer_layer_config"]["partial_rotary_factor"] = 0.5


def in_pairs(config: Config, weights: Weights) -> None:
    """The same attention where neighbouring channels turn together."""
    config["transformer_layer_config"]["is_neox_style"] = False
    head_dim = config["transformer_layer_config"]["head_dim"]
    order = torch.arange(head_dim).view(2, -1).T.flatten()
    for name, tensor in weights.items():
        if ".q_proj." in name or ".k_proj." in name:
            weights[name] = tensor.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def by_specforge(config: Config, weights: Weights) -> None:
    """As SpecForge wrote it from July to September 2026."""
    layer = config.pop("transformer_layer_config")
    config |= layer | {"norm_output": True, "architectures": ["LlamaForCausalLMEagle3"]}
    for option in [option for option in config if option.startswith("speculators_")]:
        del config[option]


def with_flag(config: Config, weights: Weights) -> None:
    """As z-lab and others say that windows see all of a block."""
    del config["sliding_window_non_causal"]
    config["is_causal"] = False


def as_it_is(config: Config, weights: Weights) -> None:
    """The form of speculators."""


def causal(draft: DraftHead) -> None:
    draft.config.sliding_window_non_causal = False


def without_mask_embedding(draft: DraftHead) -> None:
    del draft.mask_embedding


MISREADINGS = {
    "DSpark of early speculators, from the anchor": Misreading("dspark", without_layout, {"layout": "anchor"}),
    "`partial_rotary_factor` beside unscaled positions, as if it held": Misreading(
        "eagle3", with_rotary_factor, {"partial_rotary_factor": 0.5}
    ),
    "`is_causal: false` with windows, as causal": Misreading("dflash", with_flag, change=causal),
    "`is_neox_style: false`, as halves": Misreading("eagle3", in_pairs, in_halves=True),
    "`mask_embedding.pt`, not read": Misreading("dflash", as_it_is, change=without_mask_embedding),
    "SpecForge's `norm_output: true`, as fed back": Misreading("eagle3", by_specforge, {"norm_output": True}),
    "EAGLE-3.1, whose normed state is fed back, as not": Misreading("eagle3.1", as_it_is, {"norm_output": False}),
}
SIGNALS: dict[str, dict[str, dict[str, Any]]] = {  # heads as they are, and with what fault
    "dspark": {"as it is": {}, "layout='anchor'": {"layout": "anchor"}},
    "dflash": {"as it is": {}, "layout='anchor'": {"layout": "anchor"}},
    "eagle3": {"as it is": {}, "partial_rotary_factor=0.5": {"partial_rotary_factor": 0.5}},
}


class Study:
    """The target, its prompts, and heads that are trained for it in a folder.

    Attributes:
        prompts: [n, `PROMPT`] of each sort, none of them trained on.
        texts_from: the folder of the first training; all heads learn from its texts.
    """

    def __init__(self, work: Path, steps: int, seed: int):
        self.work, self.steps, self.seed = work, steps, seed
        self.texts_from: Path | None = None
        self.pair = DraftTargetPair.from_pretrained("embedded", dtype=torch.float32)
        self.target: Any = self.pair.target
        tokenizer: Any = self.pair.tokenizer
        self.target.config.eos_token_id = self.target.generation_config.eos_token_id = None
        trained_on, held_out = source_files()
        self.tokens = encode(tokenizer, read(trained_on))
        pages = encode(tokenizer, documentation.topics.values())
        self.prompts = {
            "source": windows(encode(tokenizer, read(held_out)), 1, seed, length=PROMPT, count=320),
            "English": windows(pages, 1, seed, length=PROMPT, count=320),
        }

    def trained(self, name: str) -> Path:
        """The folder of a head in the form of speculators, trained if it is not there yet."""
        folder = self.work / name
        if not folder.is_dir():
            draft = self._train(self._random_head(name), self.work / f"{name}.training")
            draft.save_pretrained(folder)
        return folder

    def _random_head(self, name: str) -> DraftHead:
        kind, fields = HEADS[name]
        recipe = TrainingRecipe(num_draft_tokens=NUM_DRAFT_TOKENS)
        vocab_size = self.target.config.vocab_size
        config = new_config(self.target, kind, recipe, vocab_size, mask_token_id=vocab_size - 1)
        for option, value in fields.items():
            setattr(config, option, value)
        torch.manual_seed(self.seed)
        head: Any = DraftHead(config).float()
        with torch.no_grad():
            for weight in head.parameters():
                if weight.ndim > 1:
                    weight.normal_(std=INITIAL_STD)
            head.lm_head.weight.copy_(self.target.get_output_embeddings().weight)
        return head.requires_grad_(False).eval()

    def _train(self, head: DraftHead, folder: Path) -> DraftHead:
        passes = math.ceil(8 * self.steps / NUM_TEXTS)
        if self.texts_from is None:
            self.texts_from = folder
        elif self.texts_from != folder:
            shutil.copytree(self.texts_from / "texts", folder / "texts", dirs_exist_ok=True)
            shutil.copy(self.texts_from / "specx_distill.json", folder)  # or it is not known as one of a training
        prompts = windows(self.tokens, 0, self.seed + 1, length=READ, count=NUM_TEXTS).tolist()
        result = distill(
            self.target,
            head,
            prompts,
            tokenizer=self.pair.tokenizer,
            held_out=self.prompts["source"][:NUM_HELD_OUT].tolist(),
            folder=folder,
            num_draft_tokens=NUM_DRAFT_TOKENS,
            max_new_tokens=WRITTEN,
            phases=1,
            texts_per_phase=NUM_TEXTS,
            passes=passes,
            learning_rate=2.0 / head.config.hidden_size,
            learn_from_prompts=True,
            seed=self.seed,
            training={"weight_decay": 0.1, "adam_beta2": 0.95},
            **SAMPLED,
        )
        draft: Any = result.pair.draft
        return draft

    def report(self, draft: DraftHead, number: int, sort: str = "source", temperature: float = 1.0) -> Any:
        """That of a call with `ROWS` prompts, the ones of this number."""
        strategy = SpeculativeDecoding(draft, num_draft_tokens=NUM_DRAFT_TOKENS, verification="token")
        ids = self.prompts[sort][NUM_HELD_OUT:][ROWS * number :][:ROWS]
        options = SAMPLED | {"temperature": temperature, "max_new_tokens": NEW_TOKENS}
        torch.manual_seed(self.seed + number)
        mask = torch.ones_like(ids)
        self.target.generate(ids, attention_mask=mask, **options, pad_token_id=1, custom_generate=strategy)
        return strategy.report

    def tokens_a_round(self, draft: DraftHead) -> str:
        """The mean of `CALLS` calls, and twice its standard error."""
        means = [self.report(draft, number).mean_acceptance_length for number in range(CALLS)]
        error = 2 * statistics.stdev(means) / len(means) ** 0.5
        return f"{statistics.fmean(means):.2f} ± {error:.2f}"


def rewritten(folder: Path, new_folder: Path, write: Callable[[Config, Weights], None]) -> Path:
    """A copy of a head in the form of another producer."""
    new_folder.mkdir(parents=True, exist_ok=True)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    if "mask_embedding" in weights:
        torch.save(weights.pop("mask_embedding"), new_folder / "mask_embedding.pt")
    write(config, weights)
    (new_folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, new_folder / "model.safetensors")
    return new_folder


def read_before(folder: Path, target: Any, misreading: Misreading) -> DraftHead:
    """The head as its files were read before."""
    to_halves = formats.pairs_to_halves
    if misreading.in_halves:
        formats.pairs_to_halves = lambda *arguments: None
    try:
        draft = DraftHead.from_pretrained(folder, target=target, **misreading.loading)
    finally:
        formats.pairs_to_halves = to_halves
    if misreading.change is not None:
        misreading.change(draft)
    return draft


def main(
    work: Annotated[Path, typer.Option(help="where heads are put")] = Path("build/misread"),
    steps: Annotated[int, typer.Option(help="of training, of 8 texts each")] = 256,
    calls: Annotated[int, typer.Option(help="for each line of the second table, 32 at most", max=32)] = 16,
    seed: int = 0,
) -> None:
    torch.set_num_threads(1)
    study = Study(work, steps, seed)
    print("| the file, and how it was read | then | now |\n| --- | --- | --- |", flush=True)
    for number, (name, misreading) in enumerate(MISREADINGS.items()):
        folder = rewritten(study.trained(misreading.head), work / f"files {number}", misreading.write)
        now = study.tokens_a_round(DraftHead.from_pretrained(folder, target=study.target))
        then = study.tokens_a_round(read_before(folder, study.target, misreading))
        print(f"| {name} | {then} | {now} |", flush=True)
    print("\n| head | read | prompts, temperature | first candidates accepted | reports: layout, chance |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for name, readings in SIGNALS.items():
        folder = rewritten(study.trained(name), work / name / "files", as_it_is)
        for reading, loading in readings.items():
            draft = DraftHead.from_pretrained(folder, target=study.target, **loading)
            for sort, temperature in (("source", 1.0), ("source", 2.0), ("English", 1.0)):
                reports = [study.report(draft, number, sort, temperature) for number in range(calls)]
                accepted = sum(report.accepted_per_position[0] for report in reports)
                accepted /= sum(report.judged_per_position[0] for report in reports)
                named = sum("one place" in report.misread_reason for report in reports)
                by_chance = sum("chance" in report.misread_reason for report in reports)
                row = (name, reading, f"{sort}, {temperature}", f"{accepted:.2f}", f"{named}, {by_chance} of {calls}")
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
