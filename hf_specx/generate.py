"""The entry as a function: bind what transformers withholds from callables, and call the host."""

import inspect
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.modeling_outputs import ModelOutput

from .checks import check_lifted
from .strategy import SpeculativeDecoding


STRATEGY_OPTIONS = ("num_draft_tokens", "verification", "layout", "compile", "draft_tokenizer", "costs")
STOCK = inspect.signature(GenerationMixin.generate).parameters.keys() - {"self", "inputs", "custom_generate", "kwargs"}
LOADER_OPTIONS = (
    "revision",
    "token",
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "repo_type",
    "trust_remote_code",
    "custom_generate",
)


def generate(inputs: torch.Tensor | None = None, *, model: PreTrainedModel, **kwargs: Any) -> Any:
    """`model.generate` with speculative sampling, for what transformers withholds from a strategy object.

    Args:
        inputs: as in `generate`.
        model: the target.
        **kwargs: everything that `generate` takes, and every option of `SpeculativeDecoding` by keyword; the draft as
            `draft_model` or `assistant_model`.

    Returns:
        As `generate`.

    Raises:
        ValueError: where no draft is given, and as `SpeculativeDecoding`.
    """
    # called by string, we may be inside the class's own `generate` already; stock then names every argument it has
    host: Any = GenerationMixin if kwargs.keys() >= STOCK else type(model)
    for name in LOADER_OPTIONS:
        kwargs.pop(name, None)
    draft_model = kwargs.pop("draft_model", None)
    assistant_model = kwargs.pop("assistant_model", None)
    if draft_model is None and assistant_model is None:
        raise ValueError("no draft: pass draft_model= or assistant_model=.")
    if assistant_model is not None and host is not type(model):
        check_lifted(model)
    if kwargs.pop("synced_gpus", None):
        raise ValueError("synced_gpus=True is not available with speculative decoding in this version; leave it out.")
    options = {name: kwargs.pop(name) for name in STRATEGY_OPTIONS if name in kwargs}
    tokenizer = kwargs.pop("tokenizer", None)
    bind_stop_strings(model, tokenizer, kwargs)
    strategy = SpeculativeDecoding(
        draft_model if draft_model is not None else assistant_model,
        streamer=kwargs.pop("streamer", None),
        tokenizer=tokenizer,
        draft_tokenizer=options.pop("draft_tokenizer", kwargs.pop("assistant_tokenizer", None)),
        **options,
    )
    strategy.adds_reports = True
    given = [] if inputs is None else [inputs]  # a class may call its first argument otherwise
    result = host.generate(model, *given, custom_generate=strategy, **kwargs)
    if isinstance(result, ModelOutput):
        result.speculation_report = strategy.report
    elif isinstance(result, dict):  # what Whisper makes of several windows
        result["speculation_report"] = strategy.report
    return result


def bind_stop_strings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, kwargs: dict[str, Any]
) -> None:
    """Turn stop strings among the arguments of `generate` into a criterion: it withholds the tokenizer they need."""
    given = [kwargs, vars(kwargs.get("generation_config") or model.generation_config)]
    strings = next((found for source in given if (found := source.get("stop_strings")) is not None), None)
    if strings is None:
        return
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r} needs the tokenizer; pass tokenizer=.")
    criteria = [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, strings)]
    kwargs |= {"stopping_criteria": StoppingCriteriaList(criteria), "stop_strings": None}
