"""How fast `specx serve` is beside `transformers serve`, alone and with its continuous batching: tokens a second.

    python scripts/serving.py                       # on an idle machine; needs pip install ".[cli,serve]"
    python scripts/serving.py --pair my-pair --target org/target --prompts prompts.txt

Clients of the `openai` package ask for completions one after another. The servers take turns, and the table has
medians; all of them run meanwhile, and wait.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_specx.hub.cards import embedded_config
from hf_specx.hub.known_pairs import EMBEDDED, embedded_folder


WAYS = ("specx serve", "transformers serve", "transformers serve --continuous-batching")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7},
}
STARTS = 180  # seconds in which a server answers


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def server(way: str, arguments: Namespace) -> Iterator[tuple[str, str]]:
    """The address of a server of its own process, and what it calls the model."""
    port = free_port()
    model = arguments.pair if way == WAYS[0] else arguments.target
    if way == WAYS[0]:
        command = [sys.executable, "-m", "hf_specx", "serve", model]
    else:
        command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", model]
        command += way.split()[2:]
    command += ["--dtype", arguments.dtype, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        begun = time.monotonic()
        while not answers(port):
            if process.poll() is not None or time.monotonic() - begun > STARTS:
                raise SystemExit(f"{' '.join(command)} does not answer")
            time.sleep(0.5)
        yield f"http://localhost:{port}/v1", model
    finally:
        process.terminate()
        process.wait()


def answers(port: int) -> bool:
    """Whether a server is there."""
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/health") as response:
            return bool(response.status == 200)
    except OSError:
        return False


async def tokens_a_second(
    address: str, model: str, clients: int, requests: int, arguments: Namespace, settings: str
) -> float:
    """Tokens that all clients together get in a second, who ask for so many completions each."""
    from openai import AsyncOpenAI

    config = json.dumps({**SETTINGS[settings], "max_new_tokens": arguments.max_new_tokens, "pad_token_id": 0})
    texts = embedded_config().prompts
    if arguments.prompts is not None:
        texts = arguments.prompts.read_text(encoding="utf-8").splitlines()

    async def client(number: int) -> int:
        emitted = 0
        async with AsyncOpenAI(base_url=address, api_key="none", timeout=600) as connection:
            for turn in range(requests):
                text = texts[(number * requests + turn) % len(texts)]
                body = {"generation_config": config, "seed": 1000 * number + turn}
                done = await connection.completions.create(model=model, prompt=text, extra_body=body)
                assert done.usage is not None
                emitted += done.usage.completion_tokens
        return emitted

    begun = time.perf_counter()
    emitted = sum(await asyncio.gather(*map(client, range(clients))))
    return emitted / (time.perf_counter() - begun)


def main() -> None:
    """Print a row for each way, and how many times that is `transformers serve` alone."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default=EMBEDDED)
    parser.add_argument("--target", default=str(embedded_folder()))
    parser.add_argument("--prompts", type=Path, help="one a line; else those of the pair in the package")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end with it
    rates: dict[tuple[str, str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        servers = {}
        for way in WAYS:
            try:
                servers[way] = stack.enter_context(server(way, arguments))
            except SystemExit as error:
                print(error, file=sys.stderr)
        for turn in range(arguments.turns + 1):  # the first is not counted
            for name in arguments.settings:
                for clients in arguments.clients:
                    for way, (address, model) in servers.items():
                        try:
                            number = arguments.requests if turn else 1
                            rate = asyncio.run(tokens_a_second(address, model, clients, number, arguments, name))
                        except Exception as error:
                            print(f"{way}: {error}", file=sys.stderr)
                            continue
                        if turn:
                            rates.setdefault((way, name, clients), []).append(rate)
                            print(f"{way}, {name}, {clients} clients: {rate:.1f}", file=sys.stderr, flush=True)
    cases = [(name, clients) for name in arguments.settings for clients in arguments.clients]
    print("| tokens a second |", *(f"{name}, {clients} clients |" for name, clients in cases))
    print("| --- |" + " ---: |" * len(cases))
    for way in WAYS:
        cells = []
        for case in cases:
            of_way, of_plain = rates.get((way, *case)), rates.get((WAYS[1], *case))
            if of_way is None or of_plain is None:
                cells.append("-")
                continue
            times = statistics.median(a / b for a, b in zip(of_way, of_plain, strict=False))
            cells.append(f"{statistics.median(of_way):.0f} ({times:.2f})")
        print(f"| `{way}` |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
