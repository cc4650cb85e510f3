"""Whether options of a strategy are what they should be, whatever it will serve; torch is not imported for that.

Commands ask for it before anything else is loaded.
"""

from collections.abc import Mapping
from typing import Any

from hf_specx.common.errors import check_names, is_int, kind, one_of, require, require_option


VERIFICATIONS = ("token", "block", "coupled")
MAX_NODES = 64  # of a tree, so that masks and scores of a round stay small beside what they save
NEEDED = {  # option: (attributes that it must have, remedy)
    "streamer": (("put", "end"), "pass a TextStreamer or another BaseStreamer"),
    "tokenizer": (("get_vocab",), "pass what AutoTokenizer.from_pretrained gives"),
    "draft_tokenizer": (("get_vocab",), "pass what AutoTokenizer.from_pretrained gives"),
    "costs": (("forward_times", "best_fixed_num_draft_tokens"), "pass strategy.costs of an earlier strategy"),
}


def check_tree(tree: Any, where: str = "") -> None:
    """Raise ValueError if this is no number of nodes."""
    rest = f"is no number of nodes; give an int from 1 to {MAX_NODES}, 'auto', or False for a chain."
    is_number = is_int(tree) and 1 <= tree <= MAX_NODES
    require_option(tree is False or is_number or tree == "auto", f"{where}tree", tree, rest)


def check_choices(num_draft_tokens: Any, verification: Any, where: str = "") -> None:
    """Check what a config may recommend, and a command takes; messages begin with `where`."""
    name, number, automatic = f"{where}num_draft_tokens", num_draft_tokens, num_draft_tokens == "auto"
    rest = "is not a number; give an int of 0 or more, or 'auto'."
    require_option(automatic or is_int(number), name, number, rest)
    rest = "is below 0; give 1 or more, 0 to decode plainly, or 'auto'."
    require_option(automatic or number >= 0, name, number, rest)
    if verification is not None:
        one_of(f"{where}verification", verification, VERIFICATIONS)


def check_options(
    options: dict[str, Any], unknown: dict[str, Any], misplaced: int, choices: Mapping[str, tuple[str, ...]]
) -> None:
    """Check all options of a strategy, by name; `choices` says what some may be.

    `unknown` are other keyword arguments, `misplaced` counts arguments after the draft without a name, as `generate`
    gives them to a class.
    """
    message = (
        "SpeculativeDecoding takes one draft (or a list of them), and its options by name. If custom_generate= was "
        "given this class, give it an object: custom_generate=SpeculativeDecoding(draft_model)."
    )
    require(not misplaced, message)
    check_names("SpeculativeDecoding", unknown, ["draft_model", *options], f"known: {', '.join(options)}.")
    check_choices(options["num_draft_tokens"], options["verification"])
    check_tree(options["tree"])
    for name, allowed in choices.items():
        one_of(name, options[name], allowed)
    compile = options["compile"]
    require(isinstance(compile, bool), f"compile={compile!r} is not a bool; use True or False.")
    for name, (needed, remedy) in NEEDED.items():
        value = options[name]
        if hasattr(value, "tokenizer"):  # of sounds or images
            remedy = "it is a processor; pass its .tokenizer"
        message = f"{name} is {kind(value)} without {' and '.join(needed)}; {remedy}, or leave it out."
        require(value is None or all(hasattr(value, each) for each in needed), message)
