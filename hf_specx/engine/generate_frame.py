"""What a strategy reads from the frame of the `generate` that calls it, since transformers hands it no other way.

`generate(custom_generate=strategy)` first asks for the strategy's signature, to learn which arguments it may pass on.
`CheckingSignature` checks the call there, for arguments that `generate` would drop, misread or reject with an unclear
message. Then `generate` prepares inputs, processors and criteria, and calls the strategy with them; what it keeps to
itself is read by `withheld_arguments`. None of it would be needed if transformers passed `streamer`, `synced_gpus` and
`tokenizer` to a callable whose signature names them.
"""

import inspect
import sys
from types import FrameType
from typing import Any

from transformers import GenerationMixin

from hf_specx.common.errors import require

from .check_arguments import check_values
from .entry import prepared_inputs, setting


DRAFT_ARGUMENTS = {  # arguments of `generate` for which a strategy object has options, and the remedy
    "assistant_model": "the strategy has its draft already, so leave it out or use hf_specx.generate",
    "assistant_tokenizer": "use SpeculativeDecoding(draft_tokenizer=...)",
}
STRATEGY_ARGUMENTS: tuple[str, ...] = ("draft_model", "num_draft_tokens", "verification", "layout", "compile", "costs")
STRATEGY_ARGUMENTS += ("tree", "stream_by", "draft_tokenizer", "tokenizer_match")
GENERATE_CODE = inspect.unwrap(GenerationMixin.generate).__code__


class CheckingSignature:
    """A strategy's `__signature__`: that of `prepared_inputs`, after a check of the `generate` that asks for it.

    `generate` calls `inspect.signature(strategy)` before it prepares anything. Nothing of a strategy runs earlier, and
    `generate` hands over neither the streamer nor what it would drop, so that its arguments are read from its frame.
    """

    def __get__(self, strategy: Any, owner: type | None = None) -> inspect.Signature:
        """The signature of an object; a class has none of this name, so that `inspect` shows its constructor's.

        Raises:
            ValueError: if `generate` has arguments that do not go with a strategy.
        """
        if strategy is None:
            raise AttributeError("__signature__")
        frame = frame_of_generate(sys._getframe(1))
        if frame is not None:
            check_call(frame, strategy.streamer)
            pass_tokenizer_on(frame)
        return inspect.signature(prepared_inputs)


def frame_of_generate(frame: FrameType | None) -> FrameType | None:
    """The frame of `GenerationMixin.generate` among the callers of the given one; None if there is none."""
    while frame is not None and frame.f_code is not GENERATE_CODE:
        frame = frame.f_back
    return frame


def withheld_arguments() -> dict[str, Any]:
    """`streamer` and `synced_gpus` of the `generate` that calls: it keeps them to itself, and decoding needs them."""
    frame = frame_of_generate(sys._getframe(1))
    arguments = {} if frame is None else frame.f_locals
    return {"streamer": arguments.get("streamer"), "synced_gpus": arguments.get("synced_gpus")}


def custom_generate_argument() -> Any:
    """`custom_generate=` of the `generate` among the callers; None if there is none, or it has none."""
    frame = frame_of_generate(sys._getframe(1))
    return None if frame is None else frame.f_locals.get("custom_generate")


def check_call(frame: FrameType, strategy_streamer: Any) -> None:
    """Raise ValueError for arguments that `generate` drops, or rejects with an unclear message.

    Args:
        frame: of `generate`.
        strategy_streamer: the option of the strategy. After an error it is ended, as the streamer of the call is, so
            that nobody waits for it.
    """
    arguments, wrapper_kwargs = frame.f_locals, _kwargs_of_wrapper(frame)
    kwargs: dict[str, Any] = arguments.get("kwargs", {})
    streamers = [each for each in (arguments.get("streamer"), strategy_streamer) if each is not None]
    try:
        check_values({"inputs": arguments.get("inputs")} | kwargs)
        for name in STRATEGY_ARGUMENTS:
            remedy = f"give it to SpeculativeDecoding({name}=...), or call hf_specx.generate without custom_generate=."
            require(name not in kwargs, f"{name}= is an option of the strategy, which was made already; {remedy}")
        for name, remedy in DRAFT_ARGUMENTS.items():
            value = wrapper_kwargs.get(name) if "tokenizer" in name else arguments.get(name)
            require(value is None, f"{name}= is of no use beside a strategy object; {remedy}.")
        message = "the strategy and the call have a streamer each; leave one of them out."
        require(len(streamers) < 2, message)
        named = kwargs | {"generation_config": arguments["generation_config"]}
        strings = setting("stop_strings", arguments["self"], named)
        message = f"stop_strings={strings!r} needs the tokenizer; pass tokenizer=."
        require(strings is None or wrapper_kwargs.get("tokenizer") is not None, message)
    except ValueError:
        for streamer in streamers:
            streamer.end()
        raise


def pass_tokenizer_on(frame: FrameType) -> None:
    """Put the tokenizer of a `generate` among the arguments that it passes on, in its frame."""
    tokenizer = _kwargs_of_wrapper(frame).get("tokenizer")
    if tokenizer is not None and "kwargs" in frame.f_locals:
        frame.f_locals["kwargs"].setdefault("tokenizer", tokenizer)


def _kwargs_of_wrapper(frame: FrameType) -> dict[str, Any]:
    """The keyword arguments of what wraps a `generate`, `torch.no_grad`: also those that it pops from its own."""
    kwargs = None if frame.f_back is None else frame.f_back.f_locals.get("kwargs")
    return kwargs if isinstance(kwargs, dict) else {}
