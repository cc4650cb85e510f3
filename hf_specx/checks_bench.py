"""Checks of what is asked of the bench."""

from .refusals import refusal


@refusal
def draft_of_no_layers(layers: int, draft_layers: int) -> str | None:
    if 0 < draft_layers < layers:
        return None
    return (
        f"draft_layers={draft_layers} is not between 0 and the {layers} layers of the target; give fewer, 1 or more."
    )


@refusal
def heads_that_do_not_divide(hidden: int, heads: int, kv_heads: int) -> str | None:
    if hidden % (2 * heads) == 0 and heads % kv_heads == 0:
        return None
    return (
        f"{heads} heads and {kv_heads} key-value heads do not divide a width of {hidden}; the heads must be a multiple "
        "of the key-value heads, and each must be of an even width."
    )


def check_recipe(layers: int, draft_layers: int, hidden: int, heads: int, kv_heads: int) -> None:
    """Whether a grafted pair can be made of these numbers."""
    draft_of_no_layers(layers, draft_layers)
    heads_that_do_not_divide(hidden, heads, kv_heads)
