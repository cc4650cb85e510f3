"""What a chat template reads besides messages, as `enable_thinking` and `tools`: checked before models are loaded."""

from typing import Any

from hf_specx.common.errors import require


SETTLED = {  # arguments of `apply_chat_template` that are no variables of a template
    *("conversation", "tokenize", "add_generation_prompt", "continue_final_message", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}


def check_template_options(options: Any, given: str) -> None:
    """Raise ValueError unless these are a chat template's own options by name; `given` is how they were written."""
    is_dict = isinstance(options, dict) and all(isinstance(key, str) for key in options)
    require(is_dict, f'{given} is no dict of options by name; give one, as {{"enable_thinking": false}}.')
    settled = sorted(SETTLED & options.keys())
    require(
        not settled,
        f"{given} has {', '.join(settled)}, which is settled by whoever applies the template; leave it out.",
    )
