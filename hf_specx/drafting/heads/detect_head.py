"""Tell the files of a draft head from those of a model."""

import re
from pathlib import Path
from typing import Any

from hf_specx.common.checkpoints import Files, read_config, read_weights
from hf_specx.common.errors import require


ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # model types of drafts that are no heads
HEAD_TENSORS = re.compile(
    r"(model\.)?(midlayer\.|layers\.0\.hidden_norm\.|hidden_norm\.|fc\.weight)|(medusa_head\.)?\d+\.\d+\."
)
HEAD_OPTIONS = {
    "speculators_model_type",
    "medusa_num_heads",
    "eagle_config",
    "dflash_config",
    "draft_vocab_size",
    "target_layer_ids",
    "dspark_config",
}


def is_head(name: str | Path, raw: dict[str, Any], **hub: Any) -> bool:
    """Whether the files of a repository or folder, with this config, are a draft head; if not, they are a model."""
    by_tensors = any(HEAD_TENSORS.match(weight) for weight in read_weights(name, names_alone=True, **hub))
    architectures = str(raw.get("architectures"))
    named_head = re.search("eagle3|peagle|dflash|dspark|domino|medusa", architectures, re.IGNORECASE)
    by_config = bool(HEAD_OPTIONS & raw.keys()) or named_head
    require(
        by_tensors or not by_config,
        f"{name} is ambiguous: its config.json is that of a draft head, and its tensors are none of one; load it "
        "yourself, by DraftHead.from_pretrained(...) or as a model.",
    )
    return by_tensors


def holds_head(files: Files) -> bool:
    """Whether a pair's draft, as its files have it, is a head."""
    return is_head(files.folder, read_config(files.folder))
