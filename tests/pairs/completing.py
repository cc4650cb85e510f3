"""A tiny pair in a folder, and processes that complete prompts with it."""

import os
import traceback
import uuid
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from counting import reads_only
from forking import context
from tiny import near, tiny
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specx import DraftTargetPair


TEXTS = ["def read(", "import os, sys\nfrom pathlib import", "x", "class Path:\n    def", "for line in"]
MANY = [f"{text} {number}" for number in range(8) for text in TEXTS]
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "seed": 5}
SECONDS = 120  # after which a process that should have ended is called stuck


def save(folder: Path) -> Path:
    """Save a pair that speaks in random tokens."""
    tokenizer = DraftTargetPair.embedded().tokenizer
    target = tiny(vocab_size=len(tokenizer), eos_token_id=list(range(900, 1000)))
    for part, model in (("target", target), ("draft", near(target, 0.05))):
        model.save_pretrained(folder / part)
    tokenizer.save_pretrained(folder / "target")
    return folder


def load(folder: Path) -> DraftTargetPair:
    target, draft = (AutoModelForCausalLM.from_pretrained(folder / part) for part in ("target", "draft"))
    return DraftTargetPair(target, draft, AutoTokenizer.from_pretrained(folder / "target"))


class Gate:
    """Where a process stops, at each forward of its target, until the gate is opened.

    Attributes:
        taken: gets the number of prompts that it had taken when it came to the gate.
    """

    def __init__(self) -> None:
        self.taken, self.opened = context.Queue(), context.Event()

    def open(self) -> None:
        self.opened.set()

    def pass_through(self, taken: int) -> None:
        if not self.opened.is_set():
            self.taken.put(taken)
        assert self.opened.wait(SECONDS)


def start(folder: Path, out: Path, gate: Gate | None = None, **options: Any) -> BaseProcess:
    """A process that completes `MANY` to a file."""
    process = context.Process(target=_complete, args=(folder, out, gate, SAMPLED | options))
    process.start()
    return process


def launch(folder: Path, out: Path, world_size: int, **options: Any) -> list[BaseProcess]:
    """Processes of one group that make the same call, as a launcher starts them."""
    store = folder / f"store-{uuid.uuid4()}"
    how = [(rank, world_size, store, folder, out, SAMPLED | options) for rank in range(world_size)]
    running = [context.Process(target=_complete_on_rank, args=each) for each in how]
    for process in running:
        process.start()
    return running


def ended(process: BaseProcess) -> int:
    """The exit code of a process that ends by itself."""
    process.join(SECONDS)
    assert process.exitcode is not None, "it is stuck"
    return process.exitcode


def _complete(folder: Path, out: Path, gate: Gate | None, options: dict[str, Any]) -> None:
    pair, taken = load(folder), []

    def texts() -> Iterator[str]:
        for text in MANY:
            taken.append(text)
            yield text

    if gate is not None:
        pair.target.register_forward_pre_hook(reads_only(lambda *_: gate.pass_through(len(taken))))
    pair.complete(texts(), out=out, **options)


def _complete_on_rank(rank: int, world_size: int, store: Path, *call: Any) -> None:
    """0 is the exit code where the call returned, else 1; a process of gloo that ends otherwise may abort."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # accelerate wants them; the store is a file
    code = 1
    try:
        distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
        folder, out, options = call
        _complete(folder, out, None, options)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)
