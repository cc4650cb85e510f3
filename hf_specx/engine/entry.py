"""What `generate` hands to a strategy, and what a user has set in a call of it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from hf_specx.common.errors import require
from hf_specx.models.prompts import PreparedInputs


def prepared_inputs(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    inputs_tensor: torch.Tensor | None = None,
    seeds: Any = None,
    tokenizer: Any = None,
    **inputs: Any,
) -> PreparedInputs:
    """What `generate` hands to a decoding method, with an argument of ours, `seeds`.

    Its parameters are what `generate` may pass on. The `tokenizer` is not used any more: stop strings have become
    criteria, and the ends of prompts were healed.
    """
    criteria = StoppingCriteriaList()
    for criterion in stopping_criteria:
        # with one row the criterion of lm-eval depends on the text of this row alone
        is_of_lm_eval = len(input_ids) == 1 and type(criterion).__name__ == "MultiTokenEOSCriteria"
        criteria.append(StopOfOneRow(criterion) if is_of_lm_eval else criterion)
    return PreparedInputs(
        model,
        input_ids,
        generation_config,
        inputs,
        processors=logits_processor,
        criteria=criteria,
        inputs_tensor=inputs_tensor,
        seeds=seeds,
    )


class StopOfOneRow(StoppingCriteria):
    """lm-eval's criterion for a stop sequence, in a batch of one row.

    It remembers which rows have the sequence; one row ends there anyway, so that this may be forgotten at each call.
    """

    stateless = True

    def __init__(self, criterion: Any):
        self.criterion = criterion

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether each of several texts [R, L] that the row may have ends: [R] bool."""
        stops = []
        for row_ids in input_ids:
            self.criterion.done_tracker = [False]
            stops.append(self.criterion(row_ids[None], scores, **kwargs))
        return torch.tensor(stops, device=input_ids.device)


def setting(name: str, model: Any, kwargs: dict[str, Any]) -> Any:
    """A field of the generation config as a user has set it: by keyword, in the call's config or in the model's.

    None if it is set nowhere.
    """
    of_call = getattr(kwargs.get("generation_config"), name, None)
    of_model = getattr(getattr(model, "generation_config", None), name, None)
    return kwargs.get(name, of_model if of_call is None else of_call)


def unset(name: str, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Remove what `setting` returns from `kwargs`, the arguments of a call; no config of the user is changed.

    Where the model's config has a value, it is hidden by a keyword, and only there: transformers warns of a keyword
    beside a config.
    """
    kwargs.pop(name, None)
    if getattr(kwargs.get("generation_config"), name, None) is not None:
        kwargs["generation_config"] = copy.copy(kwargs["generation_config"])
        setattr(kwargs["generation_config"], name, None)
    if getattr(model.generation_config, name, None) is not None:
        kwargs[name] = None


def bind_stop_strings(
    model: PreTrainedModel, tokenizer: Any, kwargs: dict[str, Any], make: Callable[..., Any] = StopStringCriteria
) -> None:
    """Replace stop strings in `kwargs`, the arguments of `generate`, by a criterion.

    Args:
        tokenizer: of the target; None if the call has none.
        make: makes the criterion of the tokenizer and a string, or a tuple of strings.

    Raises:
        ValueError: if there are stop strings that are no strings, or no tokenizer.
    """
    strings = setting("stop_strings", model, kwargs)
    if strings is None:
        return
    as_list = strings if isinstance(strings, list | tuple) else [strings]
    are_strings = all(isinstance(string, str) for string in as_list)
    require(are_strings, f"stop_strings={strings!r} is no str and no list of str; pass one of these.")
    require(tokenizer is not None, f"stop_strings={strings!r} needs the tokenizer; pass tokenizer=.")
    criteria = list(kwargs.get("stopping_criteria") or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # a user's own replaces it
        criteria.append(make(tokenizer, strings if isinstance(strings, str) else tuple(strings)))
    kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
    unset("stop_strings", model, kwargs)
