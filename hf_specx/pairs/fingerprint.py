"""What a text depends on, in a few words: so that a file of results is continued by the same call alone."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel


NUMBERS = 64  # of each weight, that tell one model from another
INDIFFERENT = ("max_batch_tokens", "costs")  # a text does not depend on them
_NOISE = ("transformers_version", "_from_model_config", "_name_or_path")  # of a config
_PLAIN = (bool, int, float, str, type(None))


def digest_of(parts: Iterable[bytes]) -> str:
    """Twelve hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:12]


def weights_digest(model: PreTrainedModel) -> str:
    """Tells one model from another by its config and the first numbers of each weight that is at hand."""
    parts = [json.dumps(plain_value(model.config))]
    for name, weight in model.named_parameters():
        numbers = [] if weight.device.type == "meta" else weight.detach().flatten()[:NUMBERS].tolist()
        parts += [f"{name} {tuple(weight.shape)}", repr(numbers)]
    return digest_of(part.encode() for part in parts)


def arguments_of(pair: Any, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """What the texts of `complete` depend on, as plain values.

    Args:
        pair: a `DraftTargetPair`.
        seed: of the first prompt.
        options: of `generate`. An object among them, such as a processor, is described by its class and by those of
            its attributes that are plain values.
    """
    strategy, tokenizer = pair.strategy, pair.tokenizer
    made: dict[str, Any] = {"models": [weights_digest(model) for model in pair.models]}
    made |= {"generation_config": pair.target.generation_config, "drafts": drafts_of(pair)}
    made |= {"tokenizer": f"{type(tokenizer).__name__} of {len(tokenizer)} tokens", "seed": seed}
    made |= {name: getattr(strategy, name) for name in ("num_draft_tokens", "verification")} | options
    if strategy.tokenizer_match != "auto":  # files of before it was told apart have none
        made["tokenizer_match"] = strategy.tokenizer_match
    return {name: plain_value(value) for name, value in made.items() if name not in INDIFFERENT}


def drafts_of(pair: Any) -> list[Any]:
    """What tells the drafts of a pair from others, as plain values; weights are told by `weights_digest`."""
    drafts = pair.draft if isinstance(pair.draft, list) else [pair.draft]
    return [_of_draft(draft) for draft in drafts]


def _of_draft(draft: Any) -> Any:
    """Drafts that are no models have settings, such as a number of layers."""
    if isinstance(draft, torch.nn.Module):
        return type(draft).__name__
    head = getattr(draft, "head", None)  # of an early exit
    if head is None:
        return plain_value(draft)
    numbers = {name: weight.flatten()[:NUMBERS].tolist() for name, weight in head.state_dict().items()}
    return plain_value(draft) | {"head": numbers}


def plain_value(value: Any) -> Any:
    """A value as JSON can hold it; the same for equal values, also in another process."""
    if isinstance(value, _PLAIN):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "to_dict"):
        value = {name: item for name, item in value.to_dict().items() if item is not None and name not in _NOISE}
    if isinstance(value, dict):
        return {str(name): plain_value(item) for name, item in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple):  # also a `LogitsProcessorList`
        return [plain_value(item) for item in value]
    kind = value if hasattr(value, "__qualname__") else type(value)
    attributes = {name: item for name, item in getattr(value, "__dict__", {}).items() if isinstance(item, _PLAIN)}
    return {"class": f"{kind.__module__}.{kind.__qualname__}"} | dict(sorted(attributes.items()))
