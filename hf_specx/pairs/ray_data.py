"""Prompts of a Ray dataset: `dataset.map_batches(CompleteBatches, ...)`. Ray itself is not imported here."""

from pathlib import Path
from typing import Any

from hf_specx.common.errors import brief, require

from .complete import Completer
from .pair import DraftTargetPair
from .results_file import NumberedText, hash_of


class CompleteBatches:
    """Completes batches of prompts; each worker loads its own copy of the pair, once.

    A text depends on its prompt, its seed and the options alone, not on batches, workers or retries.

    Args:
        pair: id or folder of a pair, as of `DraftTargetPair.from_pretrained`, or "embedded".
        prompts: name of the column with prompts.
        texts: name of the column that is added, with what was generated.
        indices: name of a column of ints: the row with index i is sampled with the seed `seed + i`. None takes 32
            bits of the prompt in place of an index, so that equal prompts have equal texts.
        batch_size: rows of a batch of the models, 8 unless given; Ray's own batches should be several times as large.
        seed: 0 unless given.
        load: options of `from_pretrained`, such as {"device_map": "cuda"}.
        **options: of `generate`, such as `max_new_tokens`.

    Example:
        >>> from hf_specx.pairs.ray_data import CompleteBatches
        >>> complete = CompleteBatches("embedded", max_new_tokens=4)
        >>> list(complete({"prompt": prompts}))
        ['prompt', 'text']
    """

    def __init__(
        self,
        pair: str | Path,
        *,
        prompts: str = "prompt",
        texts: str = "text",
        indices: str | None = None,
        batch_size: int = 8,
        seed: int = 0,
        load: dict[str, Any] | None = None,
        **options: Any,
    ):
        self.prompts, self.texts, self.indices = prompts, texts, indices
        self.completer = Completer(DraftTargetPair.from_pretrained(pair, **(load or {})), batch_size, seed, options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The columns of a batch, and that of its texts; None for a prompt that cannot be completed."""
        for column in (self.prompts, *([] if self.indices is None else [self.indices])):
            require(
                column in batch,
                f"there is no column {column!r} among {', '.join(batch)}; name the one that is meant.",
            )
        texts = list(batch[self.prompts])
        wrong = next((text for text in texts if not isinstance(text, str | None)), None)
        require(wrong is None, f"the column {self.prompts!r} has {brief(wrong)}; give strings, or None for no text.")
        if self.indices is None:
            indices = [0 if text is None else hash_of(text) % 2**32 for text in texts]
        else:
            indices = [0 if text is None else int(x) for text, x in zip(texts, batch[self.indices], strict=True)]
        smallest = min(indices, default=0)
        require(smallest >= 0, f"the column {self.indices!r} has {smallest}; give ints of 0 or more.")
        rows = zip(indices, texts, strict=True)
        prompts = [None if text is None else NumberedText(index, text) for index, text in rows]
        distinct = dict.fromkeys(prompt for prompt in prompts if prompt is not None)
        texts_of: dict[Any, str | None] = {result.prompt: result.text for result in self.completer(distinct)}
        return dict(batch) | {self.texts: [texts_of.get(prompt) for prompt in prompts]}
