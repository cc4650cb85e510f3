"""Heads whose files are misread: what is accepted of them, and how often reports say that something is wrong.

    OMP_NUM_THREADS=1 python scripts/misread_heads.py --work build/misread

Heads are trained for the target in the package, each for some hundred steps, on source of the Python standard library.
Their files are written as other producers write them, and read as they are meant and as they once were read. The first
table has tokens a round of both, and in how many short calls the report says that the head looks misread: its power.
The second table has heads that are read as they are meant, also such as have hardly learned anything, or are asked
for what they have not learned: reports of these are false alarms.
"""

import json
import math
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics as documentation
from typing import Annotated, Any, NamedTuple

import torch
import typer
from safetensors.torch import load_file, save_file
from train_pair import PROMPT, READ, SAMPLED, WRITTEN, encode, read, source_files, windows

from hf_specx import DraftHead, DraftTargetPair, SpeculativeDecoding, distill
from hf_specx.drafting.heads import formats
from hf_specx.training.head import INITIAL_STD, new_config
from hf_specx.training.recipe import RATES, TrainingRecipe


NUM_TEXTS, NUM_HELD_OUT, NUM_DRAFT_TOKENS = 256, 32, 4
TEXTS_OF_A_STEP = 8
ROWS, NEW_TOKENS = 8, 32  # of a call
WEAK_STEPS = (32, 64)  # after which heads are looked at as well
OTHER_CALLS = (("source", 2.0), ("English", 1.0))  # prompts and temperature that heads have not learned
WINDOW = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "sliding_window": 32}
FILL_IN: dict[str, Any] = {"block_size": NUM_DRAFT_TOKENS + 1, "sample_from_anchor": False}
# the kind of each head that is trained, for how many steps, and its other fields
HEADS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "eagle3": ("eagle3", 384, {"norm_before_residual": False}),
    "dspark": ("dspark", 768, FILL_IN),
    "dflash": (
        "dspark",
        768,
        FILL_IN
        | WINDOW
        | {"kind": "dflash", "markov_rank": 0, "sliding_window_non_causal": True, "mask_embedding": True},
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
    "DFlash that proposes by masks, from the anchor": Misreading("dflash", as_it_is, {"layout": "anchor"}),
    "EAGLE-3, by states of other layers": Misreading("eagle3", as_it_is, {"layer_ids": [2, 8, 13]}),
    "DSpark, by states of other layers": Misreading("dspark", as_it_is, {"layer_ids": [2, 8, 14]}),
}


class Calls(NamedTuple):
    """What was seen in calls of a head.

    Attributes:
        tokens: of a row and round, in each call.
        first_accepted: the share of first candidates that were accepted.
        layout, chance: calls whose report names another layout, or says that no more is accepted than by chance.
    """

    tokens: list[float]
    first_accepted: float
    layout: int
    chance: int

    def __str__(self) -> str:
        error = 2 * statistics.stdev(self.tokens) / len(self.tokens) ** 0.5
        return f"{statistics.fmean(self.tokens):.2f} ± {error:.2f} ({self.first_accepted:.2f})"

    @property
    def reports(self) -> str:
        """How many calls have a report, and of which sort."""
        return f"{self.layout} + {self.chance} of {len(self.tokens)}"


class Study:
    """The target, its prompts, and heads that are trained for it in a folder.

    Attributes:
        prompts: [n, `PROMPT`] of each sort, none of them trained on.
        texts_from: the folder of the first training; all heads learn from its texts.
    """

    def __init__(self, work: Path, calls: int, seed: int):
        self.work, self.calls, self.seed = work, calls, seed
        self.texts_from: Path | None = None
        self.pair = DraftTargetPair.from_pretrained("embedded", dtype=torch.float32)
        self.target: Any = self.pair.target
        tokenizer: Any = self.pair.tokenizer
        self.target.config.eos_token_id = self.target.generation_config.eos_token_id = None
        trained_on, held_out = source_files()
        self.tokens = encode(tokenizer, read(trained_on))
        pages = encode(tokenizer, documentation.topics.values())
        self.prompts = {}
        for sort, tokens in (("source", encode(tokenizer, read(held_out))), ("English", pages)):
            self.prompts[sort] = windows(tokens, 1, seed, length=PROMPT, count=NUM_HELD_OUT + ROWS * calls)

    def trained(self, name: str, steps: int | None = None) -> Path:
        """The folder of a head in the form of speculators, trained if it is not there yet; None is all its steps."""
        steps = HEADS[name][1] if steps is None else steps
        folder = self.work / f"{name} {steps}"
        if not folder.is_dir():
            draft = self._train(self._random_head(name), self.work / f"{name} {steps}.training", steps)
            draft.save_pretrained(folder)
        return folder

    def _random_head(self, name: str) -> DraftHead:
        kind, _, fields = HEADS[name]
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

    def _train(self, head: DraftHead, folder: Path, steps: int) -> DraftHead:
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
            passes=math.ceil(TEXTS_OF_A_STEP * steps / NUM_TEXTS),
            batch_size=TEXTS_OF_A_STEP,
            learning_rate=RATES["head"] / head.config.hidden_size,
            learn_from_prompts=True,
            seed=self.seed,
            training={"weight_decay": 0.1, "adam_beta2": 0.95},
            **SAMPLED,
        )
        draft: Any = result.pair.draft
        return draft

    def run_calls(self, draft: DraftHead, sort: str = "source", temperature: float = 1.0) -> Calls:
        """Short calls with `ROWS` prompts each."""
        options = SAMPLED | {"temperature": temperature, "max_new_tokens": NEW_TOKENS, "pad_token_id": 1}
        reports: list[Any] = []
        for number, ids in enumerate(self.prompts[sort][NUM_HELD_OUT:].split(ROWS)):
            strategy = SpeculativeDecoding(draft, num_draft_tokens=NUM_DRAFT_TOKENS, verification="token")
            torch.manual_seed(self.seed + number)
            self.target.generate(ids, attention_mask=torch.ones_like(ids), **options, custom_generate=strategy)
            reports.append(strategy.report)
        accepted = sum(report.accepted_per_position[0] for report in reports)
        judged = sum(report.judged_per_position[0] for report in reports)
        layout = sum("layout='" in report.misread_reason for report in reports)
        chance = sum("by chance" in report.misread_reason for report in reports)
        tokens = [report.mean_acceptance_length for report in reports]
        return Calls(tokens, accepted / judged, layout, chance)


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
    calls: Annotated[int, typer.Option(help=f"of {ROWS} rows, for each number")] = 48,
    seed: int = 0,
) -> None:
    torch.set_num_threads(1)
    study = Study(work, calls, seed)
    print("Tokens a round (share of first candidates accepted); reports of another layout + of no more than chance.\n")
    print("| the file, and how it was read | then | now | reports then | now |", flush=True)
    print("| --- | --- | --- | --- | --- |", flush=True)
    for number, (name, misreading) in enumerate(MISREADINGS.items()):
        folder = rewritten(study.trained(misreading.head), work / f"files {number}", misreading.write)
        now = study.run_calls(DraftHead.from_pretrained(folder, target=study.target))
        then = study.run_calls(read_before(folder, study.target, misreading))
        print(f"| {name} | {then} | {now} | {then.reports} | {now.reports} |", flush=True)
    print("\n| head, steps | prompts, temperature | tokens a round | reports |\n| --- | --- | --- | --- |", flush=True)
    for name, (_, all_steps, _) in HEADS.items():
        for steps in (*WEAK_STEPS, all_steps):
            draft = DraftHead.from_pretrained(study.trained(name, steps), target=study.target)
            for sort, temperature in (("source", 1.0), *OTHER_CALLS):
                seen = study.run_calls(draft, sort, temperature)
                print(f"| {name}, {steps} | {sort}, {temperature} | {seen} | {seen.reports} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
