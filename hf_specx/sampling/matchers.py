"""What follows a grammar in each row, by the library that it is of: a matcher, a guide or a function of the text."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


BITS = (torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 1  # [256, 8], of each byte
BYTES = BITS.view(torch.int64).flatten()  # [256], eight bools in one number, so that they are copied together
MOST_BACK = 4096  # tokens that an outlines guide can take back; by default 32


class Matchers:
    """A matcher for each row, each of which fills a row of a bit mask.

    Tokens after a matcher has ended are not shown to it, and its last mask stays, as in the libraries' own processors.

    Args:
        matchers: [B].
        vocab_size: V of the target.
        words: of 32 bits, in the mask of a matcher.
        beyond: whether tokens after those of its mask are allowed.
    """

    def __init__(self, matchers: Sequence[Any], vocab_size: int, words: int, beyond: bool):
        self.matchers, self.vocab_size, self.beyond = matchers, vocab_size, beyond
        self.words = torch.full((len(matchers), words), -1, dtype=torch.int32)
        self.after_end = [0] * len(matchers)  # tokens of each row that its matcher was not shown

    def accept(self, row: int, token: int) -> None:
        if self.after_end[row] or self.ended(self.matchers[row], token):
            self.after_end[row] += 1
        elif not self.show(self.matchers[row], token):
            told = f"{type(self).__name__} refuses token {token} in row {row}, which a processor brought back or its "
            told += "vocabulary lacks; put that processor before this one, or make this for the target's tokenizer."
            raise RuntimeError(told)

    def rollback(self, row: int, count: int) -> None:
        unseen = min(count, self.after_end[row])
        self.after_end[row] -= unseen
        if count > unseen:
            self.take_back(self.matchers[row], count - unseen)

    def mask(self, rows: list[int]) -> torch.Tensor:
        for row in rows:
            self.fill(self.matchers[row], row)
        masks = expanded(self.words[rows])[:, : self.vocab_size]
        return torch.nn.functional.pad(masks, (0, self.vocab_size - masks.shape[1]), value=self.beyond)

    def ended(self, matcher: Any, token: int) -> bool:
        """Whether a matcher is not shown this token, since it has ended."""
        raise NotImplementedError

    def show(self, matcher: Any, token: int) -> bool:
        """Show it a token; False if it refuses it."""
        raise NotImplementedError

    def take_back(self, matcher: Any, count: int) -> None:
        raise NotImplementedError

    def fill(self, matcher: Any, row: int) -> None:
        """Write the mask of a matcher into `words[row]`."""
        raise NotImplementedError

    def place(self, row: int) -> tuple[int, int]:
        """Address and size in bytes of `words[row]`."""
        words = self.words[row]
        return words.data_ptr(), words.numel() * words.element_size()


def expanded(words: torch.Tensor) -> torch.Tensor:
    """The bits of int32 words [R, W] as [R, 32 W] bool, the lowest bit of a word first."""
    return BYTES[words.view(torch.uint8).int()].view(torch.bool)


def sent_masks(masks: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Masks [N, V] bool from the CPU on a device, packed on the way: a bit for each token."""
    if device.type == "cpu":
        return masks
    size = masks.shape[1]
    eight = torch.nn.functional.pad(masks, (0, -size % 8)).view(torch.int64)  # eight bools, one in each byte
    # of this product the highest byte has a bit of each; in the others nothing carries over into it
    packed = (eight * 0x0102040810204080 >> 56).to(torch.uint8).to(device, non_blocking=True)
    bits = packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    return bits.flatten(1)[:, :size].bool()


class XGrammarMatchers(Matchers):
    """Matchers of xgrammar, for its own processor and that of outlines."""

    strict = True

    def ended(self, matcher: Any, token: int) -> bool:
        return matcher.is_terminated()

    def show(self, matcher: Any, token: int) -> bool:
        return matcher.accept_token(token)

    def take_back(self, matcher: Any, count: int) -> None:
        matcher.rollback(count)

    def fill(self, matcher: Any, row: int) -> None:
        terminated = matcher.is_terminated()
        if terminated:  # it has no mask; the processors leave the one before the stop token
            matcher.rollback(1)
        matcher.fill_next_token_bitmask(self.words, row)
        if terminated:
            self._stop_again(matcher)

    def _stop_again(self, matcher: Any) -> None:
        next(token for token in matcher.stop_token_ids if matcher.accept_token(token))


class LLGuidanceMatchers(Matchers):
    """Matchers of llguidance, for the processor of outlines.

    After a token that it refuses a matcher allows the end alone. It could not be taken back from there, so it is not
    shown that token.

    Attributes:
        ends: ids of the end tokens.
    """

    ends: Sequence[int] = ()

    def mask(self, rows: list[int]) -> torch.Tensor:
        masks = super().mask(rows)
        for number, row in enumerate(rows):
            if self.after_end[row]:
                masks[number] = False
                masks[number, self.ends] = True
        return masks

    def ended(self, matcher: Any, token: int) -> bool:
        return matcher.is_stopped() or not matcher.validate_tokens([token])

    def show(self, matcher: Any, token: int) -> bool:
        return matcher.consume_token(token)

    def take_back(self, matcher: Any, count: int) -> None:
        matcher.rollback(count)

    def fill(self, matcher: Any, row: int) -> None:
        matcher.unsafe_compute_mask_ptr(*self.place(row))


class OutlinesGuides(Matchers):
    """Guides of outlines-core, for the processor of outlines."""

    max_rollback = MOST_BACK
    strict = True

    def ended(self, matcher: Any, token: int) -> bool:
        return matcher.is_finished() and not matcher.accepts_tokens([token])

    def show(self, matcher: Any, token: int) -> bool:
        matcher.advance(token, return_tokens=False)
        return True

    def take_back(self, matcher: Any, count: int) -> None:
        matcher.rollback_state(count)

    def fill(self, matcher: Any, row: int) -> None:
        address, size = self.place(row)
        matcher.write_mask_into(address, self.words.shape[1], size // self.words.shape[1])


class PrefixFunction:
    """`prefix_allowed_tokens_fn`: a function of the text, so it has no state but the text itself.

    Attributes:
        barred: its errors, by row and by tokens emitted before: it allowed no token, or raised.
    """

    def __init__(self, function: Callable[[int, torch.Tensor], Any], input_ids: torch.Tensor, vocab_size: int):
        self.function, self.vocab_size = function, vocab_size
        self.prompts, self.texts = input_ids, [[] for _ in input_ids]  # type: ignore[var-annotated]
        self.barred: dict[tuple[int, int], Exception] = {}

    def accept(self, row: int, token: int) -> None:
        self.texts[row].append(token)

    def rollback(self, row: int, count: int) -> None:
        left = len(self.texts[row]) - count
        del self.texts[row][left:]
        for key in [key for key in self.barred if key[0] == row and key[1] > left]:
            del self.barred[key]

    def mask(self, rows: list[int]) -> torch.Tensor:
        masks = torch.zeros(len(rows), self.vocab_size, dtype=torch.bool)
        for number, row in enumerate(rows):
            emitted = self.texts[row]
            text = torch.cat([self.prompts[row], self.prompts.new_tensor(emitted)])
            try:
                allowed = self.function(row, text)
                if not len(allowed):
                    told = f"prefix_allowed_tokens_fn allows no token in row {row} after {len(emitted)} new ones"
                    raise ValueError(f"{told}; it must return one id or more.")
                masks[number, allowed.cpu() if isinstance(allowed, torch.Tensor) else allowed] = True
            except Exception as error:  # it counts only if this candidate is accepted
                self.barred[row, len(emitted)] = error
        return masks
