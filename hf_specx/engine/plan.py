"""How one call is decoded: its verification, its layouts, and whether positions have to be judged one by one."""

from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specx.cache.slots import has_columns
from hf_specx.drafting.schedule import Drafting
from hf_specx.layouts.choose import choose_layout, layouts_of
from hf_specx.layouts.compiled import check_compile
from hf_specx.layouts.decoder import Prompt
from hf_specx.validation.calls import check_past
from hf_specx.validation.options import check_assistant_settings
from hf_specx.validation.rows import check_fixed, check_in_order, check_seeds, check_synced


class Plan(NamedTuple):
    """What was chosen for a call.

    Attributes:
        verification: "greedy", "token", "block" or "coupled".
        layout: the target's, and `reason` says why.
        draft_layout: the draft's.
        stateful: names of processors and criteria that must be shown each emitted token once, in order.
        states: whether a model takes no layout but lockstep, where what cannot be cropped is put back and fed again.
        compiled: whether forwards behind the prompts are compiled.
    """

    verification: str
    layout: str
    reason: str
    draft_layout: str
    stateful: list[str]
    states: bool
    compiled: bool = False

    @property
    def in_order(self) -> bool:
        """Whether positions are judged one by one."""
        return bool(self.stateful)

    @property
    def lockstep(self) -> bool:
        """Whether all rows must advance alike."""
        return self.in_order or "lockstep" in (self.layout, self.draft_layout)


def make_plan(
    prompt: Prompt,
    draft_model: PreTrainedModel | CandidateGenerator,
    layout: str,
    verification: str | None,
    stateful: list[str],
    compiled: bool = False,
    synced: bool = False,
) -> Plan:
    """
    Args:
        prompt: the target's.
        draft_model: as the strategy has it.
        layout, verification: as they were asked for.
        stateful: names of processors and criteria that cannot look ahead.
        compiled: whether forwards are to be compiled.
        synced: whether other ranks have to run the same forwards.

    Raises:
        ValueError: for what was asked for and cannot be done exactly.
    """
    sampled = isinstance(draft_model, PreTrainedModel)
    able = layouts_of(prompt.model)
    if stateful:
        check_in_order(stateful, layout, verification if prompt.generation_config.do_sample else None)
        chosen = "lockstep" if "lockstep" in able else able[0]
        reason = f"needed: {', '.join(stateful)} must be shown each token once, in order"
    else:
        chosen, reason = _layout(prompt, layout)
    if not prompt.generation_config.do_sample:
        verification = "greedy"
    elif verification is None:
        verification = "coupled" if not sampled else "token" if stateful else "block"
    draft_layout, states = chosen, able[0] == "lockstep"
    if isinstance(draft_model, PreTrainedModel):
        draft_able = layouts_of(draft_model, drafts=True)
        draft_layout = chosen if chosen in draft_able else draft_able[0]
        states = states or draft_able[0] == "lockstep"
    if compiled:
        check_compile(prompt.model, chosen, reason, prompt.generation_config, synced)
        if isinstance(draft_model, PreTrainedModel):
            why = "its best for a draft"
            check_compile(draft_model, draft_layout, why, prompt.generation_config, synced)
    return Plan(verification, chosen, reason, draft_layout, stateful, states, compiled)


def _layout(prompt: Prompt, layout: str) -> tuple[str, str]:
    chosen, reason = choose_layout(prompt.model, layout)
    past: Any = prompt.kwargs.get("past_key_values")
    if chosen == "lockstep" or past is None or has_columns(past):
        return chosen, reason
    check_past(layout)
    return "lockstep", "chosen: past_key_values= does not have the keys of all tokens"


def check_plan(plan: Plan, drafting: Drafting, seeds: list[int] | None, rows: int, fixed: bool, synced: bool) -> None:
    """Whether what else a call asks for goes with its plan.

    Args:
        drafting: how many candidates it wants.
        seeds: one for each of the rows.
        fixed: whether every round has to draft the same number.
        synced: whether other ranks have to run the same forwards.
    """
    check_assistant_settings(drafting.number, drafting.schedule, drafting.threshold)
    if seeds is not None:
        check_seeds(seeds, rows, plan.verification, "lockstep" if plan.lockstep else plan.layout)
    if fixed:
        check_fixed(drafting.schedule, drafting.threshold)
    if synced:
        check_synced(plan.states, plan.stateful)
