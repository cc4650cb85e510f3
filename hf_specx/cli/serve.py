"""`specx serve`: transformers' own server, OpenAI's API, with speculative sampling behind it."""

import errno
import importlib.util
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specx.common.errors import require

from .console import imports, say
from .generate import strategy_options
from .options import LARGEST_SEED, Loading, Named, command


if TYPE_CHECKING:
    from fastapi import FastAPI

    from hf_specx.pairs.pair import DraftTargetPair


NEEDED = ("fastapi", "uvicorn", "openai", "pydantic")
NO_SUCH_ADDRESS = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # as where there is no IPv6
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
LARGEST_PORT = 2**16 - 1
HELP_PORT = "Port to listen on, up to 65535; 0 is any that is free."
HELP_BATCH_SIZE = "Rows that are decoded together; further requests wait."
HELP_VERIFICATION = "coupled (texts of a seed are those of plain generate), block or token."
HELP_SEED = "Of the seeds of requests that bring none; else new ones in each run."


@command
def serve(
    named: Named,
    loading: Loading,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(help=HELP_PORT)] = 8000,
    batch_size: Annotated[int, typer.Option(help=HELP_BATCH_SIZE, min=1)] = 8,
    verification: Annotated[str, typer.Option(help=HELP_VERIFICATION)] = "coupled",
    num_draft_tokens: Annotated[str | None, typer.Option(help="A number or auto; else the pair's.")] = None,
    seed: Annotated[int | None, typer.Option(help=HELP_SEED, min=0, max=LARGEST_SEED)] = None,
    enable_cors: Annotated[bool, typer.Option("--enable-cors", help="Let pages of any origin ask.")] = False,
    log_level: Annotated[str, typer.Option(help=f"Of the server: {', '.join(LOG_LEVELS)}.")] = "warning",
) -> None:
    """Serve a pair by OpenAI's API: chat completions, completions, responses and models, streamed or not.

    Requests that come together are decoded together, each with its own sampling, stop strings, limit, seed and
    response_format. It is the server of transformers serve, which has one model: that of this pair, by its name here.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    require(not missing, f"the server needs {', '.join(missing)}; in a clone, pip install '.[cli,serve]'.")
    require(0 <= port <= LARGEST_PORT, f"--port {port} is no port; give a number from 0 to {LARGEST_PORT}.")
    require(log_level in LOG_LEVELS, f"--log-level {log_level} is unknown; choose one of {', '.join(LOG_LEVELS)}.")
    strategy = strategy_options(num_draft_tokens, verification)
    with ExitStack() as stack:
        sockets = [stack.enter_context(each) for each in bound_sockets(host, port)]
        with imports():
            import uvicorn

            from .loading import load_named, say_what_runs
        pair = load_named(named, loading, chat=False)
        for option, value in strategy.items():
            setattr(pair.strategy, option, value)
        app = build_app(pair, named.first, batch_size=batch_size, seed=seed, enable_cors=enable_cors)
        with port_errors(host, port):  # another server may have bound it too, and listened first
            for each in sockets:
                each.listen()
        say_what_runs(pair, strategy | {"batch_size": batch_size})
        address = f"[{host}]" if ":" in host else host
        say(f"http://{address}:{sockets[0].getsockname()[1]}/v1 serves the model {named.first!r}; Ctrl-C ends it")
        server = uvicorn.Server(uvicorn.Config(app, log_level=log_level))
        with suppress(KeyboardInterrupt):  # which comes again after requests were answered
            server.run(sockets)
    app.state.generation_state.shutdown()
    report = app.state.generation_state.manager.strategy.report
    if report is not None:
        say(str(report), "dim")


@contextmanager
def port_errors(host: str, port: int) -> Iterator[None]:
    """Has a port that cannot be had raise a ValueError with the remedy."""
    try:
        yield
    except OSError as error:
        message = (
            f"port {port} of {host} cannot be listened on ({error.strerror or error}); give another one by --port"
        )
        raise ValueError(f"{message}, or --port 0 for any that is free, or another --host.") from error


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of a host, bound to the port, or to one that is free; nobody can connect yet.

    Raises:
        ValueError: the host has no address here, or the port is in use, or not for this user.
    """
    sockets: list[socket.socket] = []
    with port_errors(host, port):
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in dict.fromkeys(infos):
            try:
                sockets.append(bound_socket(family, (address[0], port, *address[2:])))
            except OSError as error:
                if error.errno not in NO_SUCH_ADDRESS or (address == infos[-1][-1] and not sockets):
                    raise
            else:
                port = sockets[-1].getsockname()[1]  # that of the first is that of all
    return sockets


def bound_socket(family: socket.AddressFamily, address: Any) -> socket.socket:
    """A TCP socket that is bound to one address."""
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not keep a port
    if family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    bound.bind(address)
    return bound


def build_app(pair: "DraftTargetPair", name: str, *, enable_cors: bool = False, **options: Any) -> "FastAPI":
    """transformers' app for one pair, which clients call by this name; options are of `QueueManager`."""
    from fastapi.responses import JSONResponse
    from transformers.cli.serving import chat_completion, completion, response, server, transcription
    from transformers.cli.serving.model_manager import ModelManager

    from hf_specx.pairs.serving import CancelOnDisconnect, PairState, QueueManager, WithBodyFields

    class PairModels(ModelManager):
        """Has the models of the pair."""

        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            return pair.target

        def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
            target = pair.target
            reads_more = target.main_input_name != "input_ids" or target.config.get_text_config() is not target.config
            if pair.processor is None and reads_more:
                processor: Any = super()._load_processor(target.name_or_path or "")
                pair.processor = processor
            return pair.processor or pair.tokenizer

    class Chats(WithBodyFields, chat_completion.ChatCompletionHandler):
        _unused_fields = chat_completion.ChatCompletionHandler._unused_fields - {"response_format"}

    class Texts(WithBodyFields, completion.CompletionHandler):
        pass

    class Responses(WithBodyFields, response.ResponseHandler):
        pass

    state = PairState(QueueManager(pair, **options))
    models = PairModels(force_model=name)
    others: dict[str, Any] = {"transcription_handler": transcription.TranscriptionHandler(models, state)}
    if importlib.util.find_spec("transformers.cli.serving.systemone") is not None:  # of later versions
        from transformers.cli.serving.systemone import SystemOneHandler

        others["systemone_handler"] = SystemOneHandler(models, state)
    app = server.build_server(
        models,
        Chats(models, state),
        completion_handler=Texts(models, state),
        response_handler=Responses(models, state),
        generation_state=state,
        enable_cors=enable_cors,
        **others,
    )

    app.add_middleware(CancelOnDisconnect)
    app.state.generation_state = state

    @app.exception_handler(ValueError)
    async def refuse(_: Any, error: ValueError) -> JSONResponse:
        return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, status_code=400)

    return app
