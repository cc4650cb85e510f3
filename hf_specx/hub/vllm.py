"""The command that serves a pair by vLLM, for those who outgrow one process.

Fields are those in the source of vLLM 0.33.0, `vllm/config/speculative.py`. Neither this nor another version was run.
"""

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from hf_specx.common.errors import require
from hf_specx.drafting.auto import FIXED_DRAFT_TOKENS
from hf_specx.drafting.heads.config import ARCHITECTURES as HEADS

from .cards import SPEECH, auto_class_of
from .known_pairs import SEQ2SEQ, embedded_folder, is_embedded
from .pair_config import ModelSource, PairConfig


OTHER_METHODS = ("eagle-", "eagle3", "dflash", "dspark")  # in the name of a draft, these overrule `method`
DIFFERENCES = (
    "vLLM drafts, samples and judges with code of its own: the distribution is the target's there too, but a seed "
    "gives other tokens.",
    "vLLM refuses min_p, logit_bias and logits processors of your own together with a draft.",
    "Fields are those of vLLM 0.33.0; earlier versions lack some, and may judge sampled drafts wrongly (its #54282).",
)


class Export(NamedTuple):
    """How to serve a pair: `--speculative-config`, the command that has it, and what is different in vLLM."""

    speculative_config: dict[str, Any]
    command: str
    remarks: list[str]

    def __str__(self) -> str:
        """The command, with the remarks as comments."""
        return "\n".join([*(f"# {remark}" for remark in self.remarks), self.command])


def vllm(config: PairConfig, name: str, *, revision: str | None = None) -> Export:
    """The `vllm serve` command of a pair; a ValueError says why vLLM cannot load it, or refuses it.

    The number of candidates is the config's; if that is "auto" or 0, that of its fastest measurement in transformers,
    or `FIXED_DRAFT_TOKENS` if nothing was measured. The pair is in a local folder of this name, else in a repository
    at this revision; "embedded" is the one in the package. Models by reference have their revision in the config.
    """
    told = f"the pair {name!r} has no draft model; vLLM has a method of its own for drafts from the text, ngram."
    require(config.weightless_draft() is None, told)
    target = _served(config.target, "target", name, revision)
    draft = _served(config.draft, "draft", name, revision)
    kind = config.draft.model_type if config.draft.model_type in HEADS else None
    word = next((word for word in OTHER_METHODS if word in draft["model"].lower()), None) if kind is None else None
    told = f"the draft {draft['model']!r} has {word!r} in its name, which vLLM takes for that method; rename or move "
    require(word is None, f"{told}it.")
    require(kind != "domino", "the draft is a head of Domino, which vLLM does not serve; use transformers.")
    sizes, own = (config.target.vocab_size, config.draft.vocab_size), config.draft_tokenizer is not None
    mapped = kind is None and (own or (None not in sizes and sizes[0] != sizes[1]))
    told = f"the target scores {sizes[0]} tokens and the draft {sizes[1]}; vLLM then needs the draft's own tokenizer, "
    told += "which a draft inside does not have: save the pair with draft='reference'."
    require(not mapped or own or config.draft.name is not None, told)
    best, number = max(config.measurements, key=lambda m: m.measured_speedup, default=None), config.num_draft_tokens
    if number in ("auto", 0):
        number = FIXED_DRAFT_TOKENS if best is None else best.num_draft_tokens
    method = "block" if config.verification in (None, "block") else "standard"
    judged = {"draft_sample_method": "probabilistic", "rejection_sample_method": method}
    named = {None: "draft_model", "peagle": "eagle3", "dflash2": "dflash"}.get(kind, kind)
    speculative = {"method": named, **draft, "num_speculative_tokens": number}
    speculative |= {"use_heterogeneous_vocab": True} if mapped else judged if kind in (None, "eagle3") else {}
    speculative |= {"parallel_drafting": True} if kind == "peagle" else {}
    remarks = {
        "Measured in transformers, no draft was faster than the target alone; compare both in vLLM.": not config.pays,
        "vLLM reads DFlash2 in z-lab's form, and a pair saves it in that of speculators.": kind == "dflash2",
        "How many tokens to draft was not measured in vLLM.": True,
        "vLLM has no coupled mode; rejection sampling is used instead.": config.verification == "coupled",
        "The models score different tokens: vLLM then drafts greedily, so another share is accepted.": mapped,
        "Not checked: both models must score equally many tokens in vLLM; specx tune tells.": None in sizes,
    }
    options = ["--revision", target["revision"]] if "revision" in target else []
    command = ["vllm", "serve", target["model"], *options, "--speculative-config", json.dumps(speculative)]
    said = [*(remark for remark, holds in remarks.items() if holds), *DIFFERENCES]
    return Export(speculative, shlex.join(command), said)


def _served(model: ModelSource, role: str, name: str, revision: str | None) -> dict[str, str]:
    """What vLLM loads a model of the pair `name` from: {"model": id or folder}, and perhaps its "revision"."""
    kind = auto_class_of(model)
    told = f"the {role} is an encoder-decoder ({kind}), which vLLM does not serve with a draft; use transformers."
    require(kind not in (SEQ2SEQ, SPEECH), told)
    if model.name is None and (is_embedded(name) or Path(name).is_dir()):
        folder = embedded_folder() if is_embedded(name) else Path(name).resolve()
        return {"model": str(folder / model.subfolder)}
    repository, remedy = model.name or name, f"save the pair with its {role} inside, and export that folder"
    if model.name is None:
        remedy = f"download it (hf download {shlex.quote(name)} --local-dir FOLDER) and export FOLDER"
    told = f"the {role} is in the subfolder {model.subfolder!r} of {repository!r}, where vLLM does not look; {remedy}."
    require(not model.subfolder, told)
    commit = model.revision if model.name is not None else revision
    return {"model": repository} | ({} if commit is None else {"revision": commit})
