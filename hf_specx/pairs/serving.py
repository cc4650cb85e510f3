"""What stands behind transformers' own server: requests that come together are decoded together by a pair.

HTTP, parsing and templates are those of `transformers.cli.serving`; only its managers are replaced here.
"""

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from transformers.cli.serving.utils import DirectStreamer, GenerateManager, GenerationState, _StreamError

from hf_specx.common.errors import require
from hf_specx.engine.check_inputs import MAX_SEED
from hf_specx.engine.requests import Completion, Piece, Request


TEXT_INPUTS = {"input_ids", "attention_mask"}
OF_BODY = ("seed", "response_format")  # fields that transformers' handlers do not put into a generation config
BODY = "fields_of_body"  # where a generation config carries them
COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # small models go on with blanks for ever
MOST_GRAMMARS = 64  # that are kept
NO_FORMAT = "give {'type': 'json_schema', 'json_schema': {'schema': ...}}, 'json_object' or 'text'."


class Job(NamedTuple):
    """A request that a client waits for.

    Attributes:
        tell: called with each piece of its text, or with the error that ended it.
        left: set when its client has gone; the row of the request then ends.
    """

    request: Request
    tell: Callable[[Piece | Exception], None]
    left: threading.Event

    def fail(self, error: Exception) -> None:
        """Tell the client of an error, if it can still be told."""
        with suppress(RuntimeError):  # of an event loop that has ended
            self.tell(error)


class CancelStreamer(DirectStreamer):
    """Has the request end where its client leaves."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.left = threading.Event()

    def cancel(self) -> None:
        self.left.set()


class QueueManager(GenerateManager):
    """Decodes texts for all clients by one `generate_many`; images and sounds one after another, by `generate`.

    Args:
        pair: a `DraftTargetPair` with a tokenizer; its strategy says how to draft.
        batch_size: rows that are decoded together.
        seed: of the seeds of requests that bring none; None for other ones in each run.
        **options: of `generate_many`, for all requests.
    """

    def __init__(self, pair: Any, batch_size: int = 8, seed: int | None = None, **options: Any):
        super().__init__()  # a thread for what is more than text
        self.pair, self.batch_size, self.options = pair, batch_size, options
        self.seeds = random.Random(seed)
        self.strategy = pair.strategy_for({})
        self.attached = pair.strategy_for({}).attached(pair.target)
        self.attached.__enter__()
        self.waiting: SimpleQueue[Job | None] = SimpleQueue()
        self.grammars: dict[str, Any] = {}  # by their schemas; requests use copies
        self.running: dict[int, Job] = {}  # by the number of the request in this `generate_many`
        self.is_stopped = False
        pieces = self._pieces()  # raises for what no request could have
        self.decoding = threading.Thread(target=self._decode, args=(pieces,), name="specx", daemon=True)
        self.decoding.start()

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue, DirectStreamer]:
        """What a client's text is put on, and its streamer."""
        seed, grammar = self._fields(gen_config)
        if not self._takes(inputs, gen_config):
            inputs = {**inputs, "logits_processor": grammar}
            return super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[Any]()
        tokenizer = getattr(processor, "tokenizer", processor)._tokenizer
        streamer = CancelStreamer(tokenizer, loop, parts, response_parser=response_parser)
        streamer.put(inputs["input_ids"])  # which it leaves out

        def tell(news: Piece | Exception) -> None:
            error = _error_of(news)
            if error or isinstance(news, Exception):
                loop.call_soon_threadsafe(parts.put_nowait, _StreamError(error))
                return
            streamer.put(torch.tensor(news.tokens, dtype=torch.int64, device="cpu"))
            if news.finished:
                streamer.end()

        self._put(inputs, gen_config, seed, grammar, streamer.left, tell)
        return parts, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Any]:
        """A text, the length of its prompt, and its tokens [n]."""
        seed, grammar = self._fields(gen_config)
        if not self._takes(inputs, gen_config):
            inputs = {**inputs, "logits_processor": grammar}
            return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
        loop, left = asyncio.get_running_loop(), threading.Event()
        future: asyncio.Future[Completion] = loop.create_future()

        def settle(result: Completion | Exception) -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        def tell(news: Piece | Exception) -> None:
            result = news if isinstance(news, Exception) else news.finished
            if result is not None:
                loop.call_soon_threadsafe(settle, result)

        self._put(inputs, gen_config, seed, grammar, left, tell)
        try:
            done = await future
        finally:
            left.set()
        require(done.tokens is not None, _error_of(Piece(done.index, [], done)))
        tokens = torch.tensor(done.tokens, dtype=torch.int64, device="cpu")
        return processor.decode(tokens, skip_special_tokens=True), inputs["input_ids"].shape[-1], tokens

    def stop(self) -> None:
        """End once what was asked for is done."""
        self.is_stopped = True
        self.waiting.put(None)
        self.attached.__exit__(None, None, None)

    def _takes(self, inputs: Any, config: Any) -> bool:
        """Whether a request is one row of text."""
        return set(inputs) <= TEXT_INPUTS and len(inputs["input_ids"]) == 1 and config.num_beams in (None, 1)

    def _put(
        self,
        inputs: Any,
        config: Any,
        seed: int | None,
        grammar: list[Any] | None,
        left: threading.Event,
        tell: Callable[[Piece | Exception], None],
    ) -> None:
        """Have a request decoded, until it has `left`."""
        request = Request(
            inputs["input_ids"][0].tolist(),
            seed=self.seeds.randrange(MAX_SEED) if seed is None else seed,
            logits_processor=grammar,
            generate_kwargs={"generation_config": config},
            cancelled=left.is_set,
        )
        self.waiting.put(Job(request, tell, left))

    def _fields(self, config: Any) -> tuple[int | None, list[Any] | None]:
        """The seed and the grammar that a config carries; it has them no longer."""
        fields = vars(config).pop(BODY, {})
        return fields.get("seed"), self._grammar(fields.get("response_format") or {"type": "text"})

    def _grammar(self, response_format: dict[str, Any]) -> list[Any] | None:
        """The processor for a `response_format` of OpenAI's; None for any text."""
        kind = response_format.get("type")
        if kind == "text":
            return None
        schema: Any = {"type": "object"}
        if kind == "json_schema":
            schema = (response_format.get("json_schema") or {}).get("schema")
        is_known = kind in ("json_schema", "json_object") and isinstance(schema, dict)
        require(is_known, f"response_format={response_format} is unknown; {NO_FORMAT}")
        key = json.dumps(COMPACT | schema)
        if key not in self.grammars:
            if len(self.grammars) == MOST_GRAMMARS:
                self.grammars.clear()
            self.grammars[key] = self._make_grammar(key)
        return [copy(self.grammars[key])]  # it is used up by its text

    @cached_property
    def _make_grammar(self) -> Callable[[str], Any]:
        """Makes processors of JSON schemas for this target: those of outlines on llguidance."""
        try:
            import outlines
            from outlines.backends import get_json_schema_logits_processor
        except ImportError as error:
            message = "response_format needs outlines and llguidance; pip install outlines llguidance."
            raise ValueError(message) from error
        model = outlines.from_transformers(self.pair.target, self.pair.tokenizer)
        return lambda schema: get_json_schema_logits_processor("llguidance", model, schema)

    def _requests(self) -> Iterator[Request | None]:
        """What clients ask for, as it comes; it waits while nothing is decoded."""
        for number in itertools.count():
            while True:
                try:
                    job = self.waiting.get(block=not self.running)
                    break
                except Empty:
                    yield None
            if job is None:
                return
            self.running[number] = job
            yield job.request

    def _pieces(self) -> Iterator[Piece]:
        """Pieces of all requests from now on; greedy ones are rows of a call that samples."""
        options = {"batch_size": self.batch_size, "stream": True, "do_sample": True} | self.options
        pieces: Iterator[Piece] = self.strategy.generate_many(self.pair.target, self._requests(), **options)
        return pieces

    def _decode(self, pieces: Iterator[Piece]) -> None:
        """Decode until the manager is stopped; after an error, of which all that run are told, with the next ones."""
        while not self.is_stopped:
            try:
                for piece in pieces:
                    job = self.running.pop(piece.index) if piece.finished else self.running[piece.index]
                    try:
                        job.tell(piece)
                    except Exception as error:  # of a parser that cannot read this text, or a loop that has ended
                        job.left.set()
                        job.fail(error)
            except Exception as error:
                for job in self.running.values():
                    job.fail(error)
                self.running.clear()
                pieces = self._pieces()


def _error_of(news: Piece | Exception) -> str:
    """What went wrong, as far as it is known; empty if nothing did."""
    if isinstance(news, Exception):
        return str(news)
    error = None if news.finished is None else news.finished.error
    return "" if error is None else error.partition(": ")[2]  # without the number of the request


class PairState(GenerationState):
    """Hands out one manager, for the one model that is served."""

    def __init__(self, manager: QueueManager):
        super().__init__()
        self.manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> QueueManager:
        return self.manager

    def shutdown(self) -> None:
        self.manager.stop()
        super().shutdown()


class FieldsOfBody:
    """What a handler of transformers also takes from the body of a request: see `OF_BODY`."""

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        config = super()._build_generation_config(body, *args, **kwargs)  # type: ignore[misc]
        setattr(config, BODY, {name: body[name] for name in OF_BODY if body.get(name) is not None})
        return config
