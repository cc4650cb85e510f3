"""The command that serves a pair by vLLM, for those who outgrow one process.

Fields are those in the source of vLLM 0.33.0, `vllm/config/speculative.py`. Neither this nor another version was run.
"""

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from hf_specx.common.drafts import FIXED_DRAFT_TOKENS
from hf_specx.common.errors import require
from hf_specx.drafting.heads.config import ARCHITECTURES as HEADS

from .cards import SEQ2SEQ, SPEECH, auto_class_of
from .known_pairs import embedded_folder, is_embedded
from .pair_config import ModelSource, PairConfig


OTHER_METHODS = ("eagle-", "eagle3", "dflash", "dspark")  # in the name of a draft, these overrule `method`
DIFFERENCES = (
    "vLLM drafts, samples and judges with code of its own: the distribution is the target's there too, but a seed "
    "gives other tokens.",
    "vLLM refuses min_p, logit_bias and logits processors of your own together with a draft.",
    "Fields are those of vLLM 0.33.0; earlier versions lack some, and may judge sampled drafts wrongly (its #54282).",
)


class Export(NamedTuple):
    """The command that serves a pair by vLLM, its `--speculative-config`, and remarks on what is different there."""

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
    require(
        config.weightless_draft() is None,
        f"the pair {name!r} has no draft model; vLLM has a method of its own for drafts from the text, ngram.",
    )
    target = _served(config.target, "target", name, revision)
    draft = _served(config.draft, "draft", name, revision)
    kind = config.draft.model_type if config.draft.model_type in HEADS else None
    for other in OTHER_METHODS if kind is None else ():
        require(
            other not in draft["model"].lower(),
            f"the draft {draft['model']!r} has {other!r} in its name, which vLLM takes for that method; rename or "
            "move it.",
        )
    require(kind != "domino", "the draft is a head of Domino, which vLLM does not serve; use transformers.")
    vocab_sizes = (config.target.vocab_size, config.draft.vocab_size)
    has_tokenizer = config.draft_tokenizer is not None
    is_mapped = kind is None and (has_tokenizer or (None not in vocab_sizes and vocab_sizes[0] != vocab_sizes[1]))
    require(
        not is_mapped or has_tokenizer or config.draft.name is not None,
        f"the target scores {vocab_sizes[0]} tokens and the draft {vocab_sizes[1]}; vLLM then needs the draft's own "
        "tokenizer, which a draft inside does not have: save the pair with draft='reference'.",
    )
    number = config.num_draft_tokens
    if number in ("auto", 0):
        fastest = max(config.measurements, key=lambda m: m.measured_speedup, default=None)
        number = FIXED_DRAFT_TOKENS if fastest is None else fastest.num_draft_tokens
    method = {None: "draft_model", "peagle": "eagle3", "dflash2": "dflash"}.get(kind, kind)
    speculative = {"method": method, **draft, "num_speculative_tokens": number}
    if is_mapped:
        speculative["use_heterogeneous_vocab"] = True
    elif kind in (None, "eagle3"):
        speculative["draft_sample_method"] = "probabilistic"
        speculative["rejection_sample_method"] = "block" if config.verification in (None, "block") else "standard"
    if kind == "peagle":
        speculative["parallel_drafting"] = True
    remarks = {
        "Measured in transformers, no draft was faster than the target alone; compare both in vLLM.": not config.pays,
        "vLLM reads DFlash2 in z-lab's form, and a pair saves it in that of speculators.": kind == "dflash2",
        "How many tokens to draft was not measured in vLLM.": True,
        "vLLM has no coupled mode; rejection sampling is used instead.": config.verification == "coupled",
        "The models score different tokens: vLLM then drafts greedily, so another share is accepted.": is_mapped,
        "Not checked: both models must score equally many tokens in vLLM; specx tune tells.": None in vocab_sizes,
    }
    options = ["--revision", target["revision"]] if "revision" in target else []
    command = ["vllm", "serve", target["model"], *options, "--speculative-config", json.dumps(speculative)]
    true_remarks = [remark for remark, is_true in remarks.items() if is_true]
    return Export(speculative, shlex.join(command), [*true_remarks, *DIFFERENCES])


def _served(model: ModelSource, role: str, name: str, revision: str | None) -> dict[str, str]:
    """The id or folder from which vLLM loads a model of the pair `name`: {"model": ...}, perhaps with "revision"."""
    kind = auto_class_of(model)
    require(
        kind not in (SEQ2SEQ, SPEECH),
        f"the {role} is an encoder-decoder ({kind}), which vLLM does not serve with a draft; use transformers.",
    )
    if model.name is None and (is_embedded(name) or Path(name).is_dir()):
        folder = embedded_folder() if is_embedded(name) else Path(name).resolve()
        return {"model": str(folder / model.subfolder)}
    repository = model.name or name
    remedy = f"save the pair with its {role} inside, and export that folder"
    if model.name is None:
        remedy = f"download it (hf download {shlex.quote(name)} --local-dir FOLDER) and export FOLDER"
    place = f"the subfolder {model.subfolder!r} of {repository!r}"
    require(not model.subfolder, f"the {role} is in {place}, where vLLM does not look; {remedy}.")
    commit = model.revision if model.name is not None else revision
    return {"model": repository} | ({} if commit is None else {"revision": commit})
