"""Refusals by stage: what cannot be done exactly is said before any forward, with the value and the remedy.

Each of these runs its checks in order, and raises a ValueError by the first that has something to say.
"""

from .checks_calls import check_call, check_outputs, check_past
from .checks_entry import (
    check_arguments,
    check_draft_found,
    check_entry,
    check_healing,
    check_one_name,
    check_pair_call,
    check_stop_strings,
    check_withheld,
)
from .checks_inputs import check_inputs
from .checks_models import check_lifted, check_pair, check_target
from .checks_options import check_assistant_settings, check_calibration, check_choices, check_options
from .checks_rows import check_fixed, check_guidance, check_in_order, check_seeds, check_synced


__all__ = [
    "check_arguments",
    "check_assistant_settings",
    "check_calibration",
    "check_call",
    "check_choices",
    "check_draft_found",
    "check_entry",
    "check_fixed",
    "check_guidance",
    "check_healing",
    "check_in_order",
    "check_inputs",
    "check_lifted",
    "check_one_name",
    "check_options",
    "check_outputs",
    "check_pair",
    "check_pair_call",
    "check_past",
    "check_seeds",
    "check_stop_strings",
    "check_synced",
    "check_target",
    "check_withheld",
]
