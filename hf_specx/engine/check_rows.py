"""Checks of what ties the rows of a batch together: seeds, order, negative prompts, ranks."""

from typing import Any

from transformers import PreTrainedModel
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_specx.common.errors import is_int, require
from hf_specx.drafting.drafter import Drafter


MAX_SEED = 2**63
WHERE_FIXED = "with synced_gpus= it must be the same on all ranks"


def as_list(seeds: Any) -> Any:
    """Seeds as a list of ints, if that is what a list, tuple, range, tensor or array holds; else what was given."""
    seeds = _plain(seeds)
    return [_plain(seed) for seed in seeds] if isinstance(seeds, list | tuple | range) else seeds


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def check_seeds(seeds: Any, rows: int, verification: str, layout: str) -> None:
    """Check that `seeds` can make each of so many rows independent of the others."""
    ints = isinstance(seeds, list) and all(map(is_int, seeds))
    require(ints, f"seeds={seeds!r} is not a list of ints; give one int a row.")
    require(
        len(seeds) == rows,
        f"there are {len(seeds)} seeds for {rows} rows (num_return_sequences included); give one a row.",
    )
    wrong = next((seed for seed in seeds if not 0 <= seed < MAX_SEED), None)
    told = f"the seed {wrong} is outside of what a torch generator takes; give ints from 0 to 2**63 - 1."
    require(wrong is None, told)
    require(
        rows == 1 or layout != "lockstep" or verification not in ("token", "block"),
        f"seeds= cannot make rows independent with verification={verification!r} and layout='lockstep', where all "
        "rows advance by as many tokens as the one that accepted the fewest; use verification='coupled', or another "
        "layout if the model takes one.",
    )


def check_guidance(
    processor: UnbatchedClassifierFreeGuidanceLogitsProcessor, model: PreTrainedModel, rows: int
) -> None:
    """Check that a model can be guided by negative prompts, and that these fit a batch of so many rows."""
    require(
        not model.config.is_encoder_decoder,
        f"guidance_scale= works for decoder-only models, here as in transformers, and {type(model).__name__} has an "
        "encoder; leave it out.",
    )
    context: dict[str, Any] = processor.unconditional_context
    ids, mask = context["input_ids"], context["attention_mask"]
    if ids is None or not context["first_pass"]:
        return
    require(
        len(ids) == rows,
        f"negative_prompt_ids has {len(ids)} rows and the batch {rows} (num_return_sequences included); give one "
        "negative prompt a row.",
    )
    if mask is not None:
        require(
            mask.shape == ids.shape,
            f"negative_prompt_attention_mask of shape {tuple(mask.shape)} does not fit negative_prompt_ids of shape "
            f"{tuple(ids.shape)}; pass both as the tokenizer gives them.",
        )
        row = int((mask[:, -1] == 0).int().argmax())
        told = f"row {row} of negative_prompt_attention_mask ends in 0: pad it on the left; set "
        require(bool(mask[:, -1].all()), f"{told}tokenizer.padding_side='left'.")


def check_synced(states: bool, schedule: str, threshold: float, drafter: Drafter) -> None:
    """Check that ranks that hold parts of the models can keep step.

    Args:
        states: whether a model may have states that cannot be cropped.
        schedule, threshold: by which the number of candidates would change.
        drafter: who proposes.
    """
    same = "synced_gpus=True needs the same forwards on every rank, and "
    told = f"num_assistant_tokens_schedule={schedule!r} changes the number of candidates by what all rows accept, and "
    require(schedule == "constant", f"{told}{WHERE_FIXED}; use 'constant'.")
    told = f"assistant_confidence_threshold={threshold} changes the number of candidates by what all rows draft, and "
    require(not threshold, f"{told}{WHERE_FIXED}; set it to 0.")
    require(not drafter.parts, f"{same}several drafts are chosen by the text; give one.")
    told = "a model that takes layout='lockstep' only is fed again what was accepted, on some ranks more often; use "
    require(not states, f"{same}{told}a target and a draft that take another layout, or replicas without synced_gpus.")
    told = "the draft has another tokenizer, so that ranks would run different forwards; give one with the target's."
    require(not drafter.own_text, told)
