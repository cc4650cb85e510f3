"""The user's prompts as token ids, which are checked, and divided into those to train on and those held out."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.chats import token_ids
from hf_specx.common.errors import brief, is_int, require
from hf_specx.common.wrappers import vocabulary
from hf_specx.pairs.complete import EMPTY


GivenPrompts = Sequence[str] | Sequence[Sequence[int]]
HELD_OUT_SHARE = 0.2
LEAST_HELD_OUT, MOST_HELD_OUT = 4, 256  # the second: held-out prompts that a share of very many gives


class Split(NamedTuple):
    """Prompts as token ids: to train on, to decide when training stops, and to report figures on."""

    training: list[list[int]]
    validation: list[list[int]]
    test: list[list[int]]


class PromptReader(NamedTuple):
    """Tokenizes prompts, and checks that each of `models` can read them with `max_new_tokens` more."""

    tokenizer: PreTrainedTokenizerBase | None
    models: Sequence[PreTrainedModel]
    max_new_tokens: int

    def read(self, prompts: GivenPrompts, name: str) -> list[list[int]]:
        """The token ids of prompts, which are texts or token ids already; `name` is the argument in messages.

        Raises ValueError for prompts that are empty, too long for a model, or not of its tokens.
        """
        require(
            isinstance(prompts, Sequence) and not isinstance(prompts, str),
            f"{name}={brief(prompts)} is no list of prompts; give a list of strings, or of lists of token ids.",
        )
        require(bool(prompts), f"{name} has no prompts; give some, the more the better.")
        return [self._ids(prompt, f"prompt {number} of {name}") for number, prompt in enumerate(prompts, 1)]

    def _ids(self, prompt: Any, which: str) -> list[int]:
        if isinstance(prompt, str):
            require(
                self.tokenizer is not None,
                "prompts are texts and there is no tokenizer to read them; pass tokenizer=, or give token ids.",
            )
            ids = token_ids(self.tokenizer, prompt)
        else:
            message = f"{which} is {brief(prompt)}; give a string, or ints of 0 or more."
            require(isinstance(prompt, Iterable), message)
            ids = list(prompt)
            require(all(is_int(i) and i >= 0 for i in ids), message)
        require(bool(ids), f"{which} {EMPTY}; leave it out.")
        for model in self.models:
            limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
            require(
                limit is None or len(ids) + self.max_new_tokens <= limit,
                f"{which} has {len(ids)} tokens, and with {self.max_new_tokens} new ones it is beyond the {limit} "
                f"positions of {type(model).__name__}; shorten it, or lower max_new_tokens.",
            )
            require(
                max(ids) < vocabulary(model),
                f"{which} has the id {max(ids)}, and {type(model).__name__} has {vocabulary(model)} tokens; it is of "
                "another tokenizer.",
            )
        return [int(i) for i in ids]


def split_prompts(prompts: GivenPrompts, held_out: float | GivenPrompts, reader: PromptReader) -> Split:
    """Divide prompts; `held_out` is a share of them (evenly spaced, at most `MOST_HELD_OUT`), or other prompts.

    Prompts that are held out are not trained on.
    """
    all_prompts = reader.read(prompts, "prompts")
    if isinstance(held_out, float | int):
        require(
            0 < held_out < 1,
            f"held_out={held_out} is no share between 0 and 1; give one like {HELD_OUT_SHARE}, or some prompts.",
        )
        count = min(round(held_out * len(all_prompts)), MOST_HELD_OUT)
        chosen = [all_prompts[number * len(all_prompts) // count] for number in range(count)]
        needed = f"{math.ceil(LEAST_HELD_OUT / held_out)} or more"
    else:
        chosen, needed = reader.read(held_out, "held_out"), "others"
    unseen = list(dict.fromkeys(map(tuple, chosen)))
    unseen_set = set(unseen)
    training = [ids for ids in all_prompts if tuple(ids) not in unseen_set]
    require(
        len(unseen) >= LEAST_HELD_OUT and bool(training),
        f"there are too few prompts: {len(unseen)} to hold out (the same one counts once) and {len(training)} to "
        f"train on; give {needed}, so that at least {LEAST_HELD_OUT} are held out, half of them to stop by and half "
        "to report on.",
    )
    return Split(training, list(map(list, unseen[::2])), list(map(list, unseen[1::2])))
