"""Generated text on a terminal: each token in the colour of its origin, and as it is emitted."""

import itertools
from collections.abc import Callable, Iterable

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_specx.common.round import RoundRecord
from hf_specx.engine.strategy import SpeculativeDecoding


# Figure 1 of Leviathan et al. 2022: accepted in green, corrections in blue; rejected candidates are not shown
STYLES = {"accepted": "green", "recovered": "bright_blue", "bonus": "magenta", "forced": "yellow"}
MEANINGS = {
    "accepted": "a candidate that was kept; ",
    "forced": "the only token allowed; ",
    "recovered": "the target's, in place of a rejected candidate; ",
    "bonus": "the target's after all candidates, or without any",
}
LEGEND = Text().join(Text.assemble((name, STYLES[name]), f": {meaning}") for name, meaning in MEANINGS.items())
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def written_out(text: str) -> str:
    """Text whose control characters are written out, since a terminal would obey them: a title, colours, answers."""
    return text.translate(CONTROLS)


class TokenDecoder:
    """Decodes token by token; a token that ends inside a character waits for the one that completes it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int]):
        self.tokenizer = tokenizer
        # some tokenizers strip a space at the start of a text, so the last tokens of the prompt come first
        self.ids = prompt[-8:]
        self.shown_from, self.shown_to = 0, len(self.ids)

    def push(self, token: int) -> str:
        """The text that this token adds, with that of tokens that waited; "" if it has to wait."""
        self.ids.append(token)
        added = self.rest()
        if not added or added.endswith("\ufffd"):
            return ""
        self.shown_from, self.shown_to = self.shown_to, len(self.ids)
        return added

    def rest(self) -> str:
        """The text of tokens that still wait; an unfinished character is shown as the replacement character."""
        shown = self._decode(self.ids[self.shown_from : self.shown_to])
        return self._decode(self.ids[self.shown_from :])[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class OriginStreamer(BaseStreamer):
    """Prints what each round has emitted; that round is the last one in the report.

    `before_first` is called before the first one, once it is clear that the call is possible.
    """

    def __init__(
        self,
        strategy: SpeculativeDecoding,
        tokenizer: PreTrainedTokenizerBase,
        console: Console,
        before_first: Callable[[], None],
    ):
        self.strategy, self.tokenizer, self.console, self.before_first = strategy, tokenizer, console, before_first
        self.decoder: TokenDecoder | None = None

    def put(self, value: torch.Tensor) -> None:
        """Print the tokens [n] of a round; the first call has the prompt [1, L], which is not printed."""
        if self.decoder is None:
            self.before_first()
            self.decoder = TokenDecoder(self.tokenizer, value.flatten().tolist())
            return
        report = self.strategy.report
        history = [] if report is None else report.history[0][-1:]
        self.console.print(coloured(value.tolist(), history, self.decoder, last=False), end="", soft_wrap=True)

    def end(self) -> None:
        """Print what waits."""
        rest = "" if self.decoder is None else self.decoder.rest()
        self.console.print(Text(written_out(rest)), soft_wrap=True)


def round_origins(record: RoundRecord) -> list[str]:
    """The origin of each token that a row emitted in a round: a key of `STYLES`."""
    accepted = min(record.accepted, record.emitted)
    follower = "bonus" if record.is_bonus else "recovered"
    num_first = next((position for position, rank in enumerate(record.ranks) if rank), accepted)
    forced = {position for position in record.forced if position < num_first}  # on the chain of first choices
    origins = ["forced" if position in forced else "accepted" for position in range(accepted)]
    return origins + [follower] * (record.emitted - accepted)


def coloured(tokens: list[int], history: Iterable[RoundRecord], decoder: TokenDecoder, last: bool = True) -> Text:
    """The text of a row's tokens, each in the style of its origin; `last` says whether it ends here.

    The decoder has read the text before them. A text without rounds was decoded plainly.
    """
    text = Text()
    origins = itertools.chain(*map(round_origins, history), itertools.repeat("bonus"))
    for token, origin in zip(tokens, origins, strict=False):  # a stop string may cut a row within its last round
        text.append(written_out(decoder.push(token)), STYLES[origin])
    return text.append(written_out(decoder.rest())) if last else text
