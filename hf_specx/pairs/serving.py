"""What stands behind transformers' own server: requests that come together are decoded together by a pair.

HTTP, parsing and templates are those of `transformers.cli.serving`. Its manager, which decodes, is replaced; its
handlers and its state are extended, and so is what happens when a client disconnects.
"""

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from transformers.cli.serving.utils import DirectStreamer, GenerateManager, GenerationState, _StreamError

from hf_specx.common.errors import require
from hf_specx.engine.check_inputs import MAX_SEED
from hf_specx.engine.entry import setting
from hf_specx.engine.requests import CancelCriteria, Completion, Piece, Request


TEXT_INPUTS = {"input_ids", "attention_mask"}
MAKES_ROWS = ("num_beams", "num_return_sequences")
# Fields of a request's body that transformers' handlers do not put into the generation config. A manager gets nothing
# else of the body, so that the config carries them to it, in an attribute.
BODY_FIELDS = ("seed", "response_format")
BODY_FIELDS_ATTRIBUTE = "body_fields"
COMPACT_JSON = {"x-guidance": {"whitespace_flexible": False}}  # else small models emit white space without end
NO_FORMAT = "give {'type': 'json_schema', 'json_schema': {'schema': ...}}, 'json_object' or 'text'."


class ClientRequest(NamedTuple):
    """A request that a client waits for.

    Attributes:
        deliver: called with each piece of its text, or with the error that ended it.
        client_left: set once its client has disconnected; the row of the request then ends.
    """

    request: Request
    deliver: Callable[[Piece | Exception], None]
    client_left: threading.Event

    def deliver_error(self, error: Exception) -> None:
        """Have the client get an error, if it is still there."""
        with suppress(RuntimeError):  # of an event loop that has ended
            self.deliver(error)


class CancelStreamer(DirectStreamer):
    """Has the request end where its client leaves."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.client_left = threading.Event()

    def cancel(self) -> None:
        self.client_left.set()


class QueueManager(GenerateManager):
    """Decodes texts for all clients by one `generate_many`; images and sounds one after another, by `generate`.

    Args:
        pair: a `DraftTargetPair` with a tokenizer; its strategy says how to draft.
        batch_size: rows that are decoded together.
        seed: from which the seeds of requests without one follow; None for other ones in each run.
        **options: of `generate_many`, for all requests.
    """

    def __init__(self, pair: Any, batch_size: int = 8, seed: int | None = None, **options: Any):
        super().__init__()  # a thread for what is more than text
        self.pair, self.batch_size, self.options = pair, batch_size, options
        self.seeds = random.Random(seed)
        self.strategy = pair.strategy_for({})
        self.attached = pair.strategy_for({}).attached(pair.target)
        self.waiting: SimpleQueue[ClientRequest | None] = SimpleQueue()
        self.running: dict[int, ClientRequest] = {}  # by the number of the request in this `generate_many`
        self.is_stopped = False
        pieces = self._pieces()  # raises for what no request could have
        self.attached.__enter__()
        self.decoding = threading.Thread(target=self._decode, args=(pieces,), name="specx", daemon=True)
        self.decoding.start()

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue, DirectStreamer]:
        """The queue that gets a client's text, bit by bit, and the streamer that fills it."""
        seed, grammar = self._pop_body_fields(gen_config)
        if not _is_single_text(model, inputs, gen_config):
            inputs = {**inputs, **self._generate_options(model, gen_config, seed, grammar)}
            return super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)
        loop, text_queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        tokenizer = getattr(processor, "tokenizer", processor)._tokenizer
        streamer = CancelStreamer(tokenizer, loop, text_queue, response_parser=response_parser)
        streamer.put(inputs["input_ids"])  # which it leaves out

        def deliver(piece: Piece | Exception) -> None:
            error = _error_of(piece)
            if isinstance(piece, Exception) or error is not None:
                loop.call_soon_threadsafe(text_queue.put_nowait, _StreamError(str(error)))
                return
            streamer.put(torch.tensor(piece.tokens, dtype=torch.int64, device="cpu"))
            if piece.finished:
                streamer.end()

        self._enqueue(inputs, gen_config, seed, grammar, streamer.client_left, deliver)
        return text_queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Any]:
        """A text, the length of its prompt, and its tokens [n]; where this is cancelled, no more is decoded."""
        seed, grammar = self._pop_body_fields(gen_config)
        client_left = threading.Event()
        if not _is_single_text(model, inputs, gen_config):
            inputs = {**inputs, **self._generate_options(model, gen_config, seed, grammar)}
            inputs["stopping_criteria"] = [CancelCriteria(client_left.is_set)]
            answer = super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
            answering = asyncio.ensure_future(answer)
            # else asyncio logs an error after the client has left
            answering.add_done_callback(lambda future: future.cancelled() or future.exception())
            try:
                return await asyncio.shield(answering)  # which its thread brings to an end in any case
            finally:
                client_left.set()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()

        def settle(result: Completion | Exception) -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        def deliver(piece: Piece | Exception) -> None:
            result = piece if isinstance(piece, Exception) else piece.finished
            if result is not None:
                loop.call_soon_threadsafe(settle, result)

        self._enqueue(inputs, gen_config, seed, grammar, client_left, deliver)
        try:
            completion = await future
        finally:
            client_left.set()
        require(completion.tokens is not None, str(completion.error))
        tokens = torch.tensor(completion.tokens, dtype=torch.int64, device="cpu")
        return processor.decode(tokens, skip_special_tokens=True), inputs["input_ids"].shape[-1], tokens

    def stop(self) -> None:
        """Wait until all that was asked for is decoded, and leave the target as it was."""
        self.is_stopped = True
        self.waiting.put(None)
        self.decoding.join()
        self.attached.__exit__(None, None, None)

    def _enqueue(
        self,
        inputs: Any,
        config: Any,
        seed: int | None,
        grammar: list[Any] | None,
        client_left: threading.Event,
        deliver: Callable[[Piece | Exception], None],
    ) -> None:
        """Have a request decoded, until its client has left."""
        request = Request(
            inputs["input_ids"][0].tolist(),
            seed=self._seed_or_next(seed),
            logits_processor=grammar,
            generate_kwargs={"generation_config": config},
            cancelled=client_left.is_set,
        )
        self.waiting.put(ClientRequest(request, deliver, client_left))

    def _seed_or_next(self, seed: int | None) -> int:
        """The seed of a request: its own, or the next one."""
        return self.seeds.randrange(MAX_SEED) if seed is None else seed

    def _generate_options(
        self, model: Any, config: Any, seed: int | None, grammar: list[Any] | None
    ) -> dict[str, Any]:
        """Arguments of `generate` for a request that is decoded alone.

        Raises:
            ValueError: for a seed of a text that has several sampled rows, as beams are.
        """
        options: dict[str, Any] = {"logits_processor": grammar}
        values = {name: setting(name, model, {"generation_config": config}) for name in (*MAKES_ROWS, "do_sample")}
        if all(values[name] in (None, 1) for name in MAKES_ROWS):
            return options | {"seeds": [self._seed_or_next(seed)]}
        shown = ", ".join(f"{name}={value}" for name, value in values.items() if value not in (None, 1, True))
        require(
            seed is None or not values["do_sample"],
            f"seed={seed} with {shown}: rows of one request are sampled by the generator of the whole server, which "
            "no request may seed; leave the seed out, or ask for one row.",
        )
        return options

    def _pop_body_fields(self, config: Any) -> tuple[int | None, list[Any] | None]:
        """The seed and the grammar that a config carries; it has them no longer."""
        fields = vars(config).pop(BODY_FIELDS_ATTRIBUTE, {})
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
        return [self._grammar_backend.get_json_schema_logits_processor(json.dumps(COMPACT_JSON | schema))]

    @cached_property
    def _grammar_backend(self) -> Any:
        """What makes processors of JSON schemas, with the target's tokenizer: that of outlines on llguidance."""
        try:
            import outlines
            from outlines.backends import LLGuidanceBackend

            return LLGuidanceBackend(outlines.from_transformers(self.pair.target, self.pair.tokenizer))
        except ImportError as error:
            message = "response_format needs outlines and llguidance; pip install outlines llguidance."
            raise ValueError(message) from error

    def _requests(self) -> Iterator[Request | None]:
        """What clients ask for, as it comes; it waits while nothing is decoded."""
        for number in itertools.count():
            while True:
                try:
                    asked = self.waiting.get(block=not self.running)
                    break
                except Empty:
                    yield None
            if asked is None:
                return
            self.running[number] = asked
            yield asked.request

    def _pieces(self) -> Iterator[Piece]:
        """Pieces of all requests from now on; greedy ones are rows of a call that samples."""
        options = {"batch_size": self.batch_size, "stream": True, "do_sample": True} | self.options
        pieces: Iterator[Piece] = self.strategy.generate_many(self.pair.target, self._requests(), **options)
        return pieces

    def _decode(self, pieces: Iterator[Piece]) -> None:
        """Decode until the manager is stopped; after an error, which all that run get, with the next ones."""
        while not self.is_stopped:
            try:
                for piece in pieces:
                    asked = self.running.pop(piece.index) if piece.finished else self.running[piece.index]
                    try:
                        asked.deliver(piece)
                    except Exception as error:  # of a parser that cannot read this text, or a loop that has ended
                        asked.client_left.set()
                        asked.deliver_error(error)
            except Exception as error:
                for asked in self.running.values():
                    asked.deliver_error(error)
                self.running.clear()
                pieces = self._pieces()


def _is_single_text(model: Any, inputs: Any, config: Any) -> bool:
    """Whether a request is one row of text, which can share a batch."""
    has_beams = setting("num_beams", model, {"generation_config": config}) not in (None, 1)
    return set(inputs) <= TEXT_INPUTS and len(inputs["input_ids"]) == 1 and not has_beams


def _error_of(piece: Piece | Exception) -> str | None:
    """Why a request was refused or failed; None if it was not."""
    if isinstance(piece, Exception):
        return str(piece)
    return None if piece.finished is None else piece.finished.error


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


class WithBodyFields:
    """What a handler of transformers also takes from the body of a request: see `BODY_FIELDS`."""

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        others = {name: value for name, value in body.items() if name != "seed"}  # it would seed the whole process
        config = super()._build_generation_config(others, *args, **kwargs)  # type: ignore[misc]
        fields = {name: body[name] for name in BODY_FIELDS if body.get(name) is not None}
        setattr(config, BODY_FIELDS_ATTRIBUTE, fields)
        return config


class CancelOnDisconnect:
    """ASGI middleware: cancels what answers a request, streamed or not, once its client has disconnected."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        messages, is_answered = asyncio.Queue[Any](), False

        async def send_and_note_end(message: Any) -> None:
            nonlocal is_answered
            is_answered |= message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def watch_client() -> None:
            message: Any = {}
            while message.get("type") != "http.disconnect":  # which also comes after the answer
                message = await receive()
                messages.put_nowait(message)
            if not is_answered:
                answering.cancel()

        answering = asyncio.ensure_future(self.app(scope, messages.get, send_and_note_end))
        watching = asyncio.ensure_future(watch_client())
        try:
            await answering
        except asyncio.CancelledError:
            if not watching.done():  # the server itself ends
                raise
        finally:
            watching.cancel()
