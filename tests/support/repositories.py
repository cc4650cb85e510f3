"""A small pair in a folder, and ways to break it: what the functions here return takes such a folder."""

import json
import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import near, tiny
from tiny_tokenizer import tiny_tokenizer

from hf_specx import DraftTargetPair
from hf_specx.common.drafts import PAIR_CONFIG_NAME
from hf_specx.hub.find_draft import find_draft


Change = Callable[[Path], object]
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 32}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
RAN = "RAN"  # a file that hostile code would make


@cache
def pair() -> DraftTargetPair:
    tokenizer = tiny_tokenizer()
    target = tiny(vocab_size=len(tokenizer), **SMALL)
    return DraftTargetPair(target, near(target, 0.1), tokenizer)


def weights_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))


def ran(folder: Path) -> bool:
    """Whether code in a folder was run."""
    return (folder / RAN).exists()


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return open, (str(self.folder / RAN), "w")


def code(folder: Path, names: str) -> str:
    """A module that makes a file when it is imported, and has classes of these names."""
    return f"open({str(folder / RAN)!r}, 'w')\n" + "".join(f"class {name}: pass\n" for name in names.split())


def load(folder: Path, **options: Any) -> DraftTargetPair:
    return DraftTargetPair.from_pretrained(folder, **options)


def load_draft(folder: Path) -> None:
    """As the code of a published pair does it: for a target that was loaded before, and by nobody's request."""
    target = tiny(vocab_size=280, **SMALL)
    target.name_or_path = str(folder)
    find_draft(target, {})


def after(*changes: Change, use: Change = load) -> Change:
    """Change a folder, then use it."""

    def misuse(folder: Path) -> None:
        for change in changes:
            change(folder)
        use(folder)

    return misuse


def edit(name: str, **changes: Any) -> Change:
    """Set fields of a JSON file; `...` takes one out."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))

    return change


def write(name: str, content: str | bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def cut(name: str, size: int) -> Change:
    """Keep the beginning of a file, or all but the end where the size is below 0."""
    return lambda folder: write(name, (folder / name).read_bytes()[:size])(folder)


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def put(field: str, value: Any) -> Change:
    """Set a field of the pair's config, like "draft.subfolder"; `...` takes it out."""

    def change(folder: Path) -> None:
        values = json.loads((folder / PAIR_CONFIG_NAME).read_text())
        *parents, last = field.split(".")
        part = values
        for parent in parents:
            part = part[parent]
        part[last] = value
        if value is ...:
            del part[last]
        (folder / PAIR_CONFIG_NAME).write_text(json.dumps(values))

    return change


def said(field: str, value: Any) -> Change:
    """Use a pair whose config says something else."""
    return after(put(field, value))


def model(**changes: Any) -> Change:
    """Use a pair whose target's config is changed."""
    return after(edit("config.json", **changes))


def tokenizer(**changes: Any) -> Change:
    return after(edit("tokenizer_config.json", **changes))


def swap_ids(folder: Path) -> None:
    """Give two tokens each other's id."""
    values = json.loads((folder / "tokenizer.json").read_text())
    ids = values["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (folder / "tokenizer.json").write_text(json.dumps(values))


def shard(folder: Path) -> None:
    """Put the target's weights into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    names, half = sorted(weights), len(weights) // 2
    parts = {"one.safetensors": names[:half], "two.safetensors": names[half:]}
    for part, names in parts.items():
        save_file({name: weights[name] for name in names}, folder / part, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    where = {name: part for part, names in parts.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], name: str = WEIGHTS) -> Change:
    """Save what a function makes of the target's weights, perhaps next to them."""
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / name, metadata={"format": "pt"})


def indexed(**changes: Any) -> Change:
    """Use a pair in shards with another index."""
    return after(shard, edit(INDEX, **changes))


def pickled(name: str, bare: bool = False) -> Change:
    """Put a pickle that runs code instead of a model's weights."""

    def change(folder: Path) -> None:
        (folder / name).parent.joinpath("model.safetensors").unlink()
        if bare:
            (folder / name).write_bytes(pickle.dumps(Payload(folder)))
        else:
            torch.save({"lm_head.weight": Payload(folder)}, folder / name)

    return change


def with_code(name: str, classes: str) -> Change:
    return lambda folder: write(name, code(folder, classes))(folder)


def move(name: str, to: str) -> Change:
    def change(folder: Path) -> None:
        (folder / to).parent.mkdir(exist_ok=True)
        (folder / name).rename(folder / to)

    return change


def link(name: str, to: str) -> Change:
    """Move a file or folder out, and link to it."""

    def change(folder: Path) -> None:
        outside = folder.parent / to
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return change


def from_there(folder: Path) -> None:
    """Load a pair while its folder is the working directory."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        load(folder)
    finally:
        os.chdir(before)
