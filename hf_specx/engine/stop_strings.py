"""Stop strings as a stopping criterion: `generate` does not pass a tokenizer on to a strategy."""

import copy
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from .check_entry import check_stop_strings


def setting(name: str, model: PreTrainedModel, kwargs: dict[str, Any]) -> Any:
    """A field of the config as the user has set it: in the call, in its config or in the model's; else None."""
    if name in kwargs:
        return kwargs[name]
    value = getattr(kwargs.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def unset(name: str, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Take what `setting` has found out of a call: out of its config, which stays as it is, and out of the model's.

    transformers warns of a keyword beside a config, so there is none where the model's has nothing that it must hide.
    """
    kwargs.pop(name, None)
    if getattr(kwargs.get("generation_config"), name, None) is not None:
        kwargs["generation_config"] = copy.copy(kwargs["generation_config"])
        setattr(kwargs["generation_config"], name, None)
    if getattr(model.generation_config, name, None) is not None:
        kwargs[name] = None


def bind_stop_strings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    kwargs: dict[str, Any],
    make: Callable[[Any, Any], StopStringCriteria] = StopStringCriteria,
) -> None:
    """Turn stop strings among the arguments of `generate` into a criterion.

    Args:
        model: whose `generation_config` may have some.
        tokenizer: None if none was given.
        kwargs: the arguments, which are changed.
        make: the criterion, from a tokenizer and a string or a tuple of strings.

    Raises:
        ValueError: if there are strings and no tokenizer, or they are no strings.
    """
    strings = setting("stop_strings", model, kwargs)
    if strings is None:
        return
    check_stop_strings(strings, tokenizer)
    criteria = list(kwargs.get("stopping_criteria") or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # a user's own replaces it
        criteria.append(make(tokenizer, strings if isinstance(strings, str) else tuple(strings)))
    kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
    unset("stop_strings", model, kwargs)
