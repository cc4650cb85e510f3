"""`specx serve`: transformers' own server, OpenAI's API, with speculative sampling behind it."""

import importlib.util
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specx.common.errors import require

from .console import imports, say
from .generate import strategy_options
from .options import LARGEST_SEED, LoadingOptions, PairOptions, command


if TYPE_CHECKING:
    from fastapi import FastAPI

    from hf_specx.pairs.pair import DraftTargetPair


NEEDED = ("fastapi", "uvicorn", "openai", "pydantic")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
LARGEST_PORT = 2**16 - 1
HELP_PORT = "Port to listen on, up to 65535; 0 is any that is free."
HELP_BATCH_SIZE = "Rows that are decoded together; further requests wait."
HELP_VERIFICATION = "coupled (texts of a seed are those of plain generate), block or token."
HELP_SEED = "Texts of requests without a seed follow from this one; by default they differ in each run."


@command
def serve(
    named: PairOptions,
    loading: LoadingOptions,
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
    with listening_socket(host, port) as listening:
        with imports():
            import uvicorn

            from .loading import load_named, say_what_runs
        pair = load_named(named, loading, chat=False)
        for option, value in strategy.items():
            setattr(pair.strategy, option, value)
        app = build_app(pair, named.first, batch_size=batch_size, seed=seed, enable_cors=enable_cors)
        say_what_runs(pair, strategy | {"batch_size": batch_size})
        address = f"[{host}]" if ":" in host else host
        say(f"http://{address}:{listening.getsockname()[1]}/v1 serves the model {named.first!r}; Ctrl-C ends it")
        server = uvicorn.Server(uvicorn.Config(app, log_level=log_level))
        with suppress(KeyboardInterrupt):  # which comes again after requests were answered
            server.run([listening])
    app.state.generation_state.shutdown()
    report = app.state.generation_state.manager.strategy.report
    if report is not None:
        say(str(report), "dim")


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on a port, or on a free one for 0: clients that connect early wait for their answer.

    Raises:
        ValueError: the host has no address here, or the port is in use, or not for this user.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ValueError(
            f"port {port} of {host} cannot be listened on: {error.strerror or error}; give another one by --port, or "
            "--port 0 for any that is free, or another --host."
        ) from error


def build_app(pair: "DraftTargetPair", name: str, *, enable_cors: bool = False, **options: Any) -> "FastAPI":
    """transformers' app for one pair, which clients call by this name; options are of `QueueManager`."""
    from fastapi import HTTPException
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
    @app.exception_handler(HTTPException)
    async def refuse(_: Any, error: ValueError | HTTPException) -> JSONResponse:
        """In the form of OpenAI's API, whose clients show no other reason."""
        reason, status = (error.detail, error.status_code) if isinstance(error, HTTPException) else (str(error), 400)
        return JSONResponse({"error": {"message": reason, "type": "invalid_request_error"}}, status_code=status)

    return app
