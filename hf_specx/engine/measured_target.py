"""Whether a target computes several tokens at once as one by one: measured where no test has shown it.

Speculation rests on that. `with_measured_target` measures before the first candidates of a call count, by the
[self-check](../models/self_check.py).
"""

import copy
from dataclasses import replace

import torch
from transformers.cache_utils import Cache

from hf_specx.common.architectures import LAYOUTS_OF
from hf_specx.models.choose import layouts_of, make_runner
from hf_specx.models.foreign_code import describe, untested_traits
from hf_specx.models.runner import ModelRunner
from hf_specx.models.self_check import RESULTS, STEPS, Conditions, Difference, compare, conditions_of, remember
from hf_specx.models.slots import cache_name

from .call import Call, in_layout, without_tree
from .ranks import any_rank
from .reasons import why_measured_wrong
from .report import PLAINLY


def with_measured_target(call: Call) -> tuple[Call, ModelRunner | None]:
    """The call in a layout where its target is right, or with the reason why transformers decodes it.

    A target is measured once for the `Conditions` of a call; the result is kept as long as the model exists. A type
    that is in no table is tried in all layouts that its attention may take, best first.

    Returns:
        The call; and the runner that has read its prompts, None if the target was not measured just now.
    """
    model = call.prompt.model
    traits = frozenset() if call.fallback_reason else untested_traits(model)
    if not traits:
        return call, None
    steps = min(STEPS, call.prompt.max_new_tokens_now - 1)  # the last token is not fed
    if not steps:
        return call, None
    layouts = [call.layout.target]
    if model.config.model_type not in LAYOUTS_OF and call.strategy.layout == "auto":
        layouts = layouts_of(model)
    candidates = max(steps, call.max_draft_tokens)
    differences = []
    for layout in layouts:
        try:
            tried = call if layout == call.layout.target else in_layout(call, layout)
        except ValueError as error:  # what was asked for does not go with this layout
            differences.append(f"{layout}: {error}")
            continue
        conditions = conditions_of(call.prompt, traits, layout, candidates, steps)
        difference, runner = _difference(tried, conditions)
        if difference.is_rounding:
            reason = f"{tried.layout.reason}; {describe(traits)}, so it was measured: {difference}"
            layout_shown = replace(tried.layout, reason=reason)
            if call.queue is not None and not conditions.hold_for_later_prompts:
                reason = f"{reason}; whole batches, since later prompts are other conditions"
                layout_shown = replace(layout_shown, reason=reason, refills=False)
            tried = replace(tried, layout=layout_shown, measured_candidates=candidates)
            if tried.tree:
                tried = without_tree(tried, "no tree: the target was measured with chains")
            return tried, runner
        differences.append(f"{layout}: {difference}")
    reason = why_measured_wrong(describe(traits), differences)
    layout_plain = replace(call.layout, target=PLAINLY, draft=PLAINLY, reason=reason)
    return replace(call, fallback_reason=reason, layout=layout_plain), None


def _difference(call: Call, conditions: Conditions) -> tuple[Difference, ModelRunner | None]:
    """How far single steps of a target are from a forward over several tokens, measured if that is not known.

    Returns:
        The difference; and what has read the prompts, if it was measured just now.
    """
    model, device = call.prompt.model, call.prompt.input_ids.device
    together = call.synced_gpus or call.tensor_parallel  # ranks measure together, and go on alike
    difference, runner = RESULTS.get(model, {}).get(conditions), None
    is_missing = difference is None
    if together:
        is_missing = any_rank(is_missing, device)
    if is_missing or difference is None:
        difference, runner, is_lasting = _measure(call, conditions)
        if is_lasting:
            remember(model, conditions, difference)
    if together and any_rank(not difference.is_rounding, device):
        difference = Difference(float("inf"), difference.limit, "another rank has found it wrong")
    return difference, runner


def _measure(call: Call, conditions: Conditions) -> tuple[Difference, ModelRunner | None, bool]:
    """How far single steps are from a forward over several tokens; what has read the prompts; whether that will last.

    A target of an unknown type that cannot be fed so is decoded plainly, and any that lacks the memory for it.
    """
    prompt, layout = call.prompt, call.layout
    kwargs = dict(prompt.kwargs)
    name = cache_name(kwargs)
    if isinstance(kwargs.get(name), Cache):  # transformers' own sampler may need it as it is
        kwargs[name] = copy.deepcopy(kwargs[name])
    try:
        runner = make_runner(layout.target, replace(prompt, kwargs=kwargs))
        batch = call.make_batch()
        output = runner.prefill()
        difference = compare(runner, batch, output, conditions.candidates, conditions.steps)
    except Exception as error:
        lacks_memory = isinstance(error, torch.OutOfMemoryError)
        if prompt.model.config.model_type in LAYOUTS_OF and not lacks_memory:
            raise  # what its hooks raise, plain `generate` raises as well
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        is_lasting = not lacks_memory  # fewer rows may fit
        return Difference(float("inf"), 0.0, message), None, is_lasting
    return difference, None if call.strategy.compile else runner, True
