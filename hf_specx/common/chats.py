"""Prompts as tokens: texts, and chats in the tokenizer's template, with what it reads besides messages.

Nothing is imported that takes time: commands check the options of a template before they load models.
"""

from collections.abc import Sequence
from typing import Any

from .errors import brief, require


SETTLED = {  # arguments of `apply_chat_template` that are no variables of a template
    *("conversation", "tokenize", "add_generation_prompt", "continue_final_message", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}


def check_template_options(options: Any, shown: str) -> None:
    """Raise ValueError unless these are a chat template's own options by name; `shown` is how they were written."""
    is_dict = isinstance(options, dict) and all(isinstance(key, str) for key in options)
    require(is_dict, f'{shown} is no dict of options by name; give one, as {{"enable_thinking": false}}.')
    settled = sorted(SETTLED & options.keys())
    require(
        not settled,
        f"{shown} has {', '.join(settled)}, which is settled by whoever applies the template; leave it out.",
    )


def chat_text(
    tokenizer: Any, messages: Sequence[dict[str, Any]], template_options: dict[str, Any] | None = None
) -> str:
    """The text of a chat in the tokenizer's template, up to where the answer begins.

    `template_options` are what the template reads besides the messages.

    Raises:
        ValueError: there is no template, or it cannot be applied to these messages.
    """
    message = "a prompt is a list of messages, and the tokenizer has no chat template; give the text itself."
    require(bool(getattr(tokenizer, "chat_template", None)), message)
    options = {**(template_options or {}), "tokenize": False, "add_generation_prompt": True}
    try:
        text = str(tokenizer.apply_chat_template(list(messages), **options))
    except Exception as error:  # of many types: a template may raise its own, or fail on a field that is missing
        message = (
            f"the chat template fails on {brief(messages)} ({error}); give messages as it wants them, each with a "
            "role and content."
        )
        raise ValueError(message) from error
    adds_bos = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    if tokenizer.bos_token is None or not adds_bos:
        return text
    return text.removeprefix(tokenizer.bos_token)  # which the template may have added too


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text; [] also where it is no valid Unicode (JSON may hold a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return []
    return list(tokenizer(text)["input_ids"])


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is one or more messages, each with a role, and with its content or calls of tools."""
    is_list = isinstance(prompt, list | tuple) and bool(prompt)
    return is_list and all(
        isinstance(message, dict) and "role" in message and not message.keys().isdisjoint(("content", "tool_calls"))
        for message in prompt
    )
