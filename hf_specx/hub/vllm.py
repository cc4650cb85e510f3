"""The command that serves a pair by vLLM, for those who outgrow one process.

The fields were taken from the source of vLLM 0.33.0 (`vllm/config/speculative.py`, with `vllm/sampling_params.py`,
`vllm/v1/sample/logits_processor/` and `vllm/v1/worker/gpu/spec_decode/` for what it refuses) and in its documentation
(`docs/features/speculative_decoding/draft_model.md`, commit 04329df5). No other version was read.
"""

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_specx.common.errors import require
from hf_specx.hub.known_pairs import SEQ2SEQ, embedded_folder, is_embedded
from hf_specx.pair_files.pair_config import ModelSource, PairConfig
from hf_specx.scheduling.draft_length import FIXED_DRAFT_TOKENS
from hf_specx.validation.choices import check_choices

from .card_usage import SPEECH, auto_class_of


OTHER_METHODS = ("eagle-", "eagle3", "dflash", "dspark")  # in the name of a draft, these overrule `method`
DIFFERENCES = (
    "vLLM drafts, samples and judges with code of its own: the distribution is the target's there too, but a seed "
    "gives other tokens.",
    "vLLM refuses min_p, logit_bias and logits processors of your own together with a draft.",
    "Fields are those of vLLM 0.33.0; earlier versions lack some, and may judge sampled drafts wrongly (its #54282).",
)


@dataclass
class Export:
    """How to serve a pair.

    Attributes:
        speculative_config: for `--speculative-config`, or `LLM(speculative_config=...)`.
        arguments: the command, as a list of words.
        remarks: sentences on what is different in vLLM, and on where the numbers come from.
    """

    speculative_config: dict[str, Any]
    arguments: list[str]
    remarks: list[str]

    @property
    def command(self) -> str:
        """The command as one line for a shell."""
        return shlex.join(self.arguments)

    def to_dict(self) -> dict[str, Any]:
        """The attributes and the command, as plain values for JSON."""
        return {**asdict(self), "command": self.command}

    def __str__(self) -> str:
        """The command, with the remarks as comments."""
        return "\n".join([*(f"# {' '.join(remark.split())}" for remark in self.remarks), self.command])


def vllm(config: PairConfig, name: str, *, revision: str | None = None, num_draft_tokens: int | None = None) -> Export:
    """The `vllm serve` command of a pair, and its `--speculative-config`.

    Args:
        config: of the pair.
        name: a local folder, else the id of its repository; "embedded" is the pair in the package.
        revision: of that repository; models by reference have theirs in the config.
        num_draft_tokens: None takes the config's; if that is "auto", the number of its fastest measurement, or
            `FIXED_DRAFT_TOKENS` if nothing was measured.

    Raises:
        ValueError: vLLM cannot load this pair, or refuses it.
    """
    told = f"the pair {name!r} has no draft model; vLLM has a method of its own for drafts from the text, ngram."
    require(config.weightless_draft() is None, told)
    check_choices(config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens, config.verification)
    folder = _folder(name)
    for role, model in (("target", config.target), ("draft", config.draft)):
        _check_served(model, role, name, folder)
    target, draft = (_location(model, name, folder) for model in (config.target, config.draft))
    word = next((word for word in OTHER_METHODS if word in draft.lower()), None)
    told = f"the draft {draft!r} has {word!r} in its name, which vLLM takes for that method; rename or move it."
    require(word is None, told)
    require(
        config.draft.name is not None or config.draft_tokenizer is not None or not _differ_in_size(config),
        f"the target scores {config.target.vocab_size} tokens and the draft {config.draft.vocab_size}; vLLM then "
        "needs the draft's own tokenizer, which a draft inside does not have: save the pair with draft='reference'.",
    )
    number, reason = _number(config, num_draft_tokens)
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": number}
    speculative |= _revision(config.draft, revision, folder) | _judging(config)
    arguments = ["vllm", "serve", target]
    for key, value in _revision(config.target, revision, folder).items():
        arguments += [f"--{key}", value]
    arguments += ["--speculative-config", json.dumps(speculative)]
    return Export(speculative, arguments, [reason, *_remarks(config), *DIFFERENCES])


def _check_served(model: ModelSource, role: str, name: str, folder: Path | None) -> None:
    """Whether vLLM can load a model of a pair, which is by this name, and in this folder if it is a local one."""
    kind = auto_class_of(model)
    told = f"the {role} is an encoder-decoder ({kind}), which vLLM does not serve with a draft; use transformers."
    require(kind not in (SEQ2SEQ, SPEECH), told)
    inside, repository = model.name is None, model.name or name
    remedy = f"save the pair with its {role} inside, and export that folder"
    if inside:
        remedy = f"download it (hf download {shlex.quote(repository)} --local-dir FOLDER) and export FOLDER"
    require(
        not model.subfolder or (inside and folder is not None),
        f"the {role} is in the subfolder {model.subfolder!r} of {repository!r}, where vLLM does not look; {remedy}.",
    )


def _folder(name: str) -> Path | None:
    """The local folder that a name means, if it means one."""
    if Path(name).is_dir():
        return Path(name).resolve()
    return embedded_folder() if is_embedded(name) else None


def _location(model: ModelSource, name: str, folder: Path | None) -> str:
    """What vLLM loads a model from: an id on the Hub, or a folder."""
    if model.name is not None:
        return model.name
    return name if folder is None else str(folder / model.subfolder)


def _revision(model: ModelSource, revision: str | None, folder: Path | None) -> dict[str, str]:
    """{"revision": ...} for a model on the Hub, where one is known."""
    given = model.revision if model.name is not None else revision if folder is None else None
    return {} if given is None else {"revision": given}


def _number(config: PairConfig, given: int | None) -> tuple[int, str]:
    """How many tokens to draft, and a sentence that says why."""
    if given is not None:
        return given, f"num_speculative_tokens is {given} as asked for."
    if isinstance(config.num_draft_tokens, int):
        return config.num_draft_tokens, f"num_speculative_tokens is {config.num_draft_tokens} as the pair recommends."
    if not config.measurements:
        return FIXED_DRAFT_TOKENS, f"Nothing was measured: num_speculative_tokens is {FIXED_DRAFT_TOKENS} for a start."
    best = max(config.measurements, key=lambda m: m.measured_speedup)
    return best.num_draft_tokens, (
        f"num_speculative_tokens is that of the fastest measurement in transformers ({best.measured_speedup:.2f} "
        f"times plain generate at batch {best.batch} on {best.hardware}); measure anew in vLLM."
    )


def _judging(config: PairConfig) -> dict[str, Any]:
    """How vLLM draws and judges candidates: as this package does, where it can."""
    if _differ_in_tokens(config):
        return {"use_heterogeneous_vocab": True}
    method = "block" if config.verification in (None, "block") else "standard"
    return {"draft_sample_method": "probabilistic", "rejection_sample_method": method}


def _differ_in_size(config: PairConfig) -> bool:
    sizes = config.target.vocab_size, config.draft.vocab_size
    return None not in sizes and sizes[0] != sizes[1]


def _differ_in_tokens(config: PairConfig) -> bool:
    return config.draft_tokenizer is not None or _differ_in_size(config)


def _remarks(config: PairConfig) -> list[str]:
    remarks = []
    if config.verification == "coupled":
        remarks.append("vLLM has no coupled mode; rejection sampling is used instead.")
    if _differ_in_tokens(config):
        remarks.append(
            "The models score different tokens: vLLM then drafts greedily, so acceptance is not what was measured "
            "here."
        )
    if None in (config.target.vocab_size, config.draft.vocab_size):
        remarks.append("Not checked: both models must score equally many tokens in vLLM; specx tune tells.")
    return remarks
