"""All that a text depends on, as values in JSON, so that only the same call goes on with a file of results."""

import copyreg
import functools
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.fingerprint import digest_of, fingerprint_of, model_fingerprint, module_tensors
from hf_specx.common.tokenizers import vocabulary_of


INDIFFERENT = ("max_batch_tokens", "costs")  # a text does not depend on them
_WITHOUT_EFFECT = ("transformers_version", "_from_model_config", "_name_or_path")  # of a config
_JSON_SCALARS = (bool, int, float, str, type(None))


def arguments_of(pair: Any, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """All that the texts of `complete` depend on, by name, as JSON has it."""
    models = [pair.target, *(draft for draft in pair.drafts if isinstance(draft, PreTrainedModel))]
    arguments: dict[str, Any] = {
        "models": [model_fingerprint(model) for model in models],
        "tokenizer": pair.tokenizer,
        "generation_config": pair.target.generation_config,
        "drafts": drafts_of(pair),
        "seed": seed,
        "num_draft_tokens": pair.strategy.num_draft_tokens,
        "verification": pair.strategy.verification,
        "tree": pair.strategy.tree,
        "tokenizer_match": pair.strategy.tokenizer_match,
    }
    arguments |= options
    return {name: json_value(value) for name, value in arguments.items() if name not in INDIFFERENT}


def drafts_of(pair: Any) -> list[Any]:
    """A description of each draft as JSON has it, without weights, whose fingerprint `arguments_of` has."""
    descriptions: list[Any] = []
    for draft in pair.drafts:
        if isinstance(draft, torch.nn.Module):
            descriptions.append(type(draft).__name__)
            continue
        attributes: dict[str, Any] = {
            name: value for name, value in vars(draft).items() if isinstance(value, _JSON_SCALARS)
        }
        head = getattr(draft, "head", None)  # of an early exit
        if head is not None:
            attributes["head"] = fingerprint_of({}, module_tensors(head))
        descriptions.append({"class": _class_name(draft)} | dict(sorted(attributes.items())))
    return descriptions


def json_value(value: Any, above: tuple[int, ...] = ()) -> Any:
    """A value as JSON can hold it: the same for equal values, also in another process, and another for others.

    An object becomes its class with its content, or with its attribute `fingerprint`. `above` has the ids of the
    objects that contain it, so that a cycle ends.
    """
    if isinstance(value, _JSON_SCALARS):
        return value
    if isinstance(getattr(value, "fingerprint", None), str):
        return {"class": _class_name(value), "fingerprint": value.fingerprint}
    if id(value) in above:
        return "above"
    within = functools.partial(json_value, above=(*above, id(value)))
    if isinstance(value, PreTrainedModel):
        return model_fingerprint(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "get_vocab"):
        return vocabulary_of(value).digest
    if hasattr(value, "to_dict"):
        value = {
            name: item for name, item in value.to_dict().items() if item is not None and name not in _WITHOUT_EFFECT
        }
    if isinstance(value, dict):
        return {str(name): within(item) for name, item in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple):  # also a `LogitsProcessorList`
        return [within(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, map(within, value)))
    return {"class": _class_name(value)} | _content(value, within)


def _content(value: Any, within: Callable[[Any], Any]) -> dict[str, Any]:
    """The content of an object as a dict: of a function its code and values, of others what would be pickled."""
    if isinstance(value, type | ModuleType) or _class_name(value).endswith("Tokenizer"):  # texts are of one tokenizer
        return {}
    if isinstance(value, bytes):
        return {"holds": digest_of([value])}
    if isinstance(value, CodeType):
        return {"holds": [value.co_code.hex(), within(value.co_consts), list(value.co_names)]}
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return {"holds": within([value.__code__, cells, value.__defaults__, value.__kwdefaults__])}
    if hasattr(value, "serialize_json"):  # a compiled grammar of xgrammar
        return {"holds": digest_of([str(value.serialize_json()).encode()])}
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        reduced: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception as error:  # of any type
        message = (
            f"{_class_name(value)} cannot be told from others of its kind ({error}), and a file of texts is continued "
            "by the same call alone; where it is held, set an attribute fingerprint, a text that says what it does."
        )
        raise ValueError(message) from error
    if not isinstance(reduced, tuple):
        return {"holds": within(reduced)}
    _, arguments, state, *_ = *reduced, None, None
    if arguments != (type(value),):
        return {"holds": within(list(reduced[1:3]))}
    if isinstance(state, dict | None):  # of a class in Python, with attributes
        return within(state or {})
    return {"holds": within(state)}


def _class_name(value: Any) -> str:
    """The full name of a module, class or function, or of the class of anything else."""
    if isinstance(value, ModuleType):
        return value.__name__
    named = value if hasattr(value, "__qualname__") and hasattr(value, "__module__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
