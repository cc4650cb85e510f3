"""A target that the tests have not shown to be right is measured before its first candidates count."""

import copy
from dataclasses import replace

import torch
from transformers.cache_utils import Cache

from hf_specx.common.architectures import LAYOUTS_OF
from hf_specx.drafting.auto import MAX_DRAFT_TOKENS
from hf_specx.models.choose import layouts_of, make_runner
from hf_specx.models.foreign_code import describe, unproven
from hf_specx.models.runner import ModelRunner
from hf_specx.models.self_check import RESULTS, STEPS, Conditions, Difference, compare, conditions_of, remember
from hf_specx.models.slots import cache_name

from .call import Call, in_layout
from .ranks import any_rank
from .report import PLAINLY
from .run import make_batch


SILENCE = "num_draft_tokens=0 decodes plainly without this warning"


def proven(call: Call) -> tuple[Call, ModelRunner | None]:
    """A call whose target is right with several tokens at once: in this layout, in another, or decoded plainly.

    A target is measured once for the `Conditions` of a call; what was found stays known as long as the model exists. A
    type that is in no table is tried in all layouts that its attention may take, best first.

    Returns:
        The call; and what has read its prompts, if the target was measured just now.
    """
    model = call.prompt.model
    traits = frozenset() if call.fallback_reason else unproven(model)
    if not traits:
        return call, None
    steps = min(STEPS, call.prompt.longest - 1)  # the last token is not fed
    if not steps:
        return call, None
    layouts = [call.layout.target]
    if model.config.model_type not in LAYOUTS_OF and call.options.layout == "auto":
        layouts = layouts_of(model)
    number = call.drafting.number or call.drafter.max_candidates or MAX_DRAFT_TOKENS
    candidates = max(steps, number)
    reasons = []
    for layout in layouts:
        try:
            tried = call if layout == call.layout.target else in_layout(call, layout)
        except ValueError as error:  # what was asked for does not go with this layout
            reasons.append(f"{layout}: {error}")
            continue
        conditions = conditions_of(call.prompt, traits, layout, candidates, steps)
        difference, runner = _difference(tried, conditions)
        if difference.is_rounding:
            reason = f"{tried.layout.reason}; {describe(traits)}, so it was measured: {difference}"
            layout_shown = replace(tried.layout, reason=reason)
            if call.queue is not None and not conditions.hold_for_later_prompts:
                reason = f"{reason}; whole batches, since later prompts are other conditions"
                layout_shown = replace(layout_shown, reason=reason, refills=False)
            proven_call = replace(tried, layout=layout_shown, measured_candidates=candidates)
            if tried.nodes:
                proven_call = replace(proven_call, nodes=0, tree_reason="no tree: the target was measured with chains")
            return proven_call, runner
        reasons.append(f"{layout}: {difference}")
    reason = f"{describe(traits)}, and several tokens at once give it other distributions than one at a time "
    reason = f"{reason}({'; '.join(reasons)}); {SILENCE}"
    layout_plain = replace(call.layout, target=PLAINLY, draft=PLAINLY, reason=reason)
    return replace(call, fallback_reason=reason, layout=layout_plain), None


def _difference(call: Call, conditions: Conditions) -> tuple[Difference, ModelRunner | None]:
    """How far single steps of a target are from a forward over several tokens, measured if that is not known.

    Returns:
        The difference; and what has read the prompts, if it was measured just now.
    """
    model, device = call.prompt.model, call.prompt.input_ids.device
    together = call.synced or call.shared  # ranks measure together, and go on alike
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
        batch = make_batch(call)
        output = runner.prefill()
        difference = compare(runner, batch, output, conditions.candidates, conditions.steps)
    except Exception as error:
        lacks_memory = isinstance(error, torch.OutOfMemoryError)
        if prompt.model.config.model_type in LAYOUTS_OF and not lacks_memory:
            raise  # what its hooks raise, plain `generate` raises as well
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        is_lasting = not lacks_memory  # fewer rows may fit
        return Difference(float("inf"), 0.0, message), None, is_lasting
    return difference, None if call.options.compile else runner, True
