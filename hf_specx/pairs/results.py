"""What became of a prompt, and the line of a file that says so."""

import hashlib
import json
from dataclasses import dataclass

from hf_specx.common.errors import is_int


@dataclass(frozen=True)
class NumberedText:
    """A prompt and its index among all prompts."""

    index: int
    text: str


@dataclass(frozen=True)
class CompletedText:
    """What became of a prompt.

    Attributes:
        prompt: it.
        text: what was generated, without special tokens; None if the prompt was refused.
        finish_reason: as in `Completion`.
        error: why the prompt was refused.
    """

    prompt: NumberedText
    text: str | None
    finish_reason: str
    error: str | None = None

    def line(self) -> bytes:
        """The line of a file."""
        values = {"index": self.prompt.index, "prompt_hash": f"{hash_of(self.prompt.text):016x}", "text": self.text}
        values |= {"finish_reason": self.finish_reason} | ({} if self.error is None else {"error": self.error})
        return json.dumps(values, ensure_ascii=False).encode() + b"\n"


def hash_of(text: str) -> int:
    """64 bits that tell one prompt from another, never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") or 1


def index_and_hash(line: bytes) -> tuple[int, int] | None:
    """The index of the prompt of a line, and its `hash_of`; None if it is no line of ours."""
    try:
        values = json.loads(line)
        index, prompt_hash = values["index"], int(values["prompt_hash"], 16)
    except (ValueError, TypeError, KeyError):
        return None
    return (index, prompt_hash) if is_int(index) and index >= 0 and 0 < prompt_hash < 2**64 else None
