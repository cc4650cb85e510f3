"""A target that the tests have not shown to be right is measured before its first candidates count."""

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_specx.common.architectures import LAYOUTS_OF
from hf_specx.drafting.auto import MAX_DRAFT_TOKENS
from hf_specx.models.choose import layouts_of, make_runner
from hf_specx.models.runner import ModelRunner
from hf_specx.models.self_check import NO_DIFFERENCE, RESULTS, STEPS, Difference, compare, describe, unproven
from hf_specx.models.slots import cache_name

from .call import Call, in_layout
from .ranks import any_rank
from .report import PLAINLY
from .run import make_batch


SILENCE = "num_draft_tokens=0 decodes plainly without this warning"


def proven(call: Call) -> tuple[Call, ModelRunner | None]:
    """A call whose target is right with several tokens at once: in this layout, in another, or decoded plainly.

    A target is measured once for its traits, a layout, and one row or several; what was found stays known as long as
    the model exists. A type that is in no table is tried in all layouts that its attention may take, best first.

    Returns:
        The call; and what has read its prompts, if the target was measured just now.
    """
    model = call.prompt.model
    traits = frozenset() if call.plain else unproven(model)
    if not traits:
        return call, None
    layouts = [call.layout.target]
    if model.config.model_type not in LAYOUTS_OF and call.options.layout == "auto":
        layouts = layouts_of(model)
    steps = min(STEPS, call.prompt.longest - 1)  # the last token is not fed
    if not steps:
        return call, None
    results, several = RESULTS.setdefault(model, {}), len(call.prompt.input_ids) > 1
    reasons = []
    for layout in layouts:
        tried, runner = call if layout == call.layout.target else in_layout(call, layout), None
        key = (traits, model.dtype, layout, several, steps)
        if key not in results:
            runner, results[key] = _measure(tried, steps)
        difference = results[key]
        if difference.is_rounding:
            reason = f"{tried.layout.reason}; {describe(traits)}, so it was measured: {difference}"
            return replace(tried, layout=replace(tried.layout, reason=reason)), runner
        reasons.append(f"{layout}: {difference}")
    plain = f"{describe(traits)}, and several tokens at once give it other distributions than one at a time "
    plain = f"{plain}({'; '.join(reasons)}); {SILENCE}"
    return replace(call, plain=plain, layout=replace(call.layout, target=PLAINLY, draft=PLAINLY, reason=plain)), None


def _measure(call: Call, steps: int) -> tuple[ModelRunner | None, Difference]:
    """What has read the prompts of a call, and how far single steps are from a forward over several tokens."""
    prompt, layout = call.prompt, call.layout
    kwargs = dict(prompt.kwargs)
    name = cache_name(kwargs)
    if isinstance(kwargs.get(name), Cache) and layout.target == "lockstep":  # which fills the cache that it is given
        kwargs[name] = copy.deepcopy(kwargs[name])
    runner: Any = None
    try:
        runner = make_runner(layout.target, replace(prompt, kwargs=kwargs))
        batch = make_batch(prompt, layout.lockstep, call.queue)
        output = runner.prefill()
        number = call.drafting.number or call.drafter.max_candidates or MAX_DRAFT_TOKENS
        difference = compare(runner, batch, output, max(steps, number), steps)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the code of an unknown type says of how it is fed here
        if prompt.model.config.model_type in LAYOUTS_OF:
            raise
        difference = Difference(float("inf"), 0.0, f"{type(error).__name__}: {error}".splitlines()[0])
    if call.synced or call.shared:  # ranks go on alike
        failed = any_rank(not difference.is_rounding, prompt.input_ids.device)
        difference = Difference(float("inf"), difference.limit) if failed else NO_DIFFERENCE
    return (None if call.options.compile else runner), difference
