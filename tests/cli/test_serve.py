"""`specx serve`: in this process without a port, and as a process of its own with the clients that people have."""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command import command

from hf_specx import DraftTargetPair


pytest.importorskip("fastapi", reason="pip install '.[serve]'")
openai = pytest.importorskip("openai")

TEMPLATE = "{% for m in messages %}{{ '# ' + m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{{ 'def ' }}"
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 30, "max_new_tokens": 24, "pad_token_id": 1}
PROMPTS = ["def main(", "import os", "class Reader:", "for line in", "    return"]
CHAT = [{"role": "user", "content": "sort a list"}]


@pytest.fixture(scope="module")
def pair() -> DraftTargetPair:
    pair = DraftTargetPair.embedded(dtype=torch.float32)
    pair.tokenizer.chat_template = TEMPLATE
    return pair


def plain(pair: DraftTargetPair, prompt: str | list, seed: int = 0, **options) -> str:
    """The text of plain `generate` under a seed."""
    if isinstance(prompt, list):
        inputs = pair.tokenizer.apply_chat_template(prompt, return_tensors="pt", return_dict=True)
    else:
        inputs = pair.tokenizer(prompt, return_tensors="pt")
    torch.manual_seed(seed)
    text = type(pair.target).generate(pair.target, **inputs, tokenizer=pair.tokenizer, **options)
    return pair.tokenizer.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_server_of_transformers_answers_by_the_pair(pair: DraftTargetPair):
    from fastapi.testclient import TestClient

    from hf_specx.cli.serve import build_app

    pair.strategy.verification, pair.strategy.num_draft_tokens = "coupled", 3
    app = build_app(pair, "embedded", batch_size=2, seed=1)
    with TestClient(app) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["embedded"]
        body = {"model": "embedded", "prompt": PROMPTS[0], "max_tokens": 12}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == plain(pair, PROMPTS[0], max_new_tokens=12)
        assert answer["choices"][0]["finish_reason"] == "length"
        body = {"model": "embedded", "messages": CHAT, "generation_config": json.dumps(SAMPLED), "seed": 3}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == plain(pair, CHAT, 3, **SAMPLED)
        refused = client.post("/v1/completions", json={"model": "embedded", "prompt": ""})
        assert refused.status_code == 400
        assert "is no prompt" in refused.json()["error"]["message"]
        wrong = {"model": "embedded", "messages": CHAT, "response_format": {"type": "xml"}}
        refused = client.post("/v1/chat/completions", json=wrong)
        assert refused.status_code == 400
        assert "response_format" in refused.json()["error"]["message"]
        refused = client.post("/v1/completions", json={"model": "other", "prompt": "def"})
        assert refused.status_code == 400
        assert "embedded" in refused.json()["error"]["message"]  # transformers' own reason, in OpenAI's form
    app.state.generation_state.shutdown()
    assert app.state.generation_state.manager.strategy.report.accepted > 0


def test_what_the_server_needs(monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else find(name))
    result = command("serve")
    assert result.exit_code == 2
    assert "needs uvicorn" in result.stderr


def test_a_port_that_cannot_be_had_is_refused_before_models_are_loaded():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = command("serve", "no/pair", "--host", "127.0.0.1", "--port", str(port))
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1 cannot be listened on: Address already in use" in result.stderr
    assert "--port 0" in result.stderr
    for option, value in {"--port": "65536", "--host": "no host", "--log-level": "loud"}.items():
        result = command("serve", "no/pair", option, value)
        assert result.exit_code == 2
        assert value in result.stderr


def test_it_says_that_it_serves_once_clients_can_connect(monkeypatch: pytest.MonkeyPatch):
    """At its end no thread of it is left, and the target is as it was."""
    import uvicorn

    said: list[str] = []

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        for each in sockets:
            with socket.create_connection(each.getsockname()[:2], timeout=10):
                said.append(f"http://localhost:{each.getsockname()[1]}/v1 serves")
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", run)
    result = command("serve", "embedded", "--port", "0")
    assert result.exit_code == 0, result.stderr
    assert said
    assert set(said) == {said[0]}
    assert said[0] in result.stderr
    assert not [thread for thread in threading.enumerate() if thread.name == "specx"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_when_its_client_disconnects(pair: DraftTargetPair, stream: bool):
    """Also one that is not streamed: a round later at most."""
    from hf_specx.cli.serve import build_app

    pair.strategy.verification, pair.strategy.num_draft_tokens = "coupled", 1
    app = build_app(pair, "embedded")
    manager = app.state.generation_state.manager
    body = {"model": "embedded", "prompt": PROMPTS[0], "max_tokens": 100, "stream": stream}
    sent: list[dict] = []

    async def ask() -> None:
        loop, has_begun = asyncio.get_running_loop(), asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        class Watch:
            def observe(self, done) -> None:
                loop.call_soon_threadsafe(has_begun.set)

        manager.strategy.listeners = (Watch(),)

        async def receive() -> dict:
            if messages:
                return messages.pop()
            await has_begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "headers": headers,
        }
        scope |= {"query_string": b"", "root_path": "", "scheme": "http", "client": ("", 1), "server": ("", 2)}
        await app(scope | {"asgi": {"version": "3.0", "spec_version": "2.3"}}, receive, send)

    asyncio.run(ask())
    app.state.generation_state.shutdown()
    assert 0 < manager.strategy.report.emitted < 100
    assert stream or not sent


@pytest.fixture(scope="module")
def served(pair: DraftTargetPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of a server that is a process of its own, and the model's name."""
    folder = tmp_path_factory.mktemp("served") / "pair"
    pair.save_pretrained(folder)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    arguments = ["serve", str(folder), "--port", str(port), "--dtype", "float32", "--batch-size", "8"]
    process = subprocess.Popen([sys.executable, "-m", "hf_specx", *arguments], stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and not answers(port):
            time.sleep(0.2)
        yield f"http://localhost:{port}/v1", str(folder)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/health") as response:
            return response.status == 200
    except OSError:
        return False


@pytest.fixture
def client(served: tuple[str, str]):
    return openai.OpenAI(base_url=served[0], api_key="none")


@pytest.mark.slow
def test_texts_under_a_seed_are_those_of_plain_generate(client, served: tuple[str, str], pair: DraftTargetPair):
    _, model = served
    assert [each.id for each in client.models.list()] == [model]
    sampled = {"generation_config": json.dumps(SAMPLED)}
    for seed, prompt in enumerate(PROMPTS):
        expected = plain(pair, prompt, seed, **SAMPLED)
        whole = client.completions.create(model=model, prompt=prompt, seed=seed, extra_body=sampled)
        assert whole.choices[0].text == expected
        assert whole.usage.completion_tokens <= 24
        parts = client.completions.create(model=model, prompt=prompt, seed=seed, stream=True, extra_body=sampled)
        assert "".join(part.choices[0].text for part in parts) == expected
    expected = plain(pair, CHAT, 7, **SAMPLED)
    for stream in (False, True):
        answer = client.chat.completions.create(model=model, messages=CHAT, seed=7, stream=stream, extra_body=sampled)
        if stream:
            text = "".join(part.choices[0].delta.content or "" for part in answer)
        else:
            text = answer.choices[0].message.content
        assert text == expected
    stopped = client.completions.create(model=model, prompt="def main(", max_tokens=40, stop=["\n"])
    assert stopped.choices[0].text == plain(pair, "def main(", max_new_tokens=40, stop_strings=["\n"])
    assert stopped.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="is no prompt"):
        client.completions.create(model=model, prompt="")


@pytest.mark.slow
def test_clients_at_once_of_whom_some_leave(served: tuple[str, str], pair: DraftTargetPair):
    """Of 32 that come together every fourth leaves after its first part; all others have their texts."""
    address, model = served
    sampled = {"generation_config": json.dumps(SAMPLED)}
    expected = [plain(pair, PROMPTS[number % 5], number, **SAMPLED) for number in range(32)]

    async def ask(number: int) -> str:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", timeout=300) as client:
            create, options = client.completions.create, {"seed": number, "extra_body": sampled}
            if number % 2:
                done = await create(model=model, prompt=PROMPTS[number % 5], **options)
                return done.choices[0].text
            parts = await create(model=model, prompt=PROMPTS[number % 5], stream=True, **options)
            text = ""
            async for part in parts:
                text += part.choices[0].text
                if number % 4 == 0:
                    await parts.close()
                    break
            return text

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*map(ask, range(32)))

    texts = asyncio.run(all_at_once())
    for number, text in enumerate(texts):
        if number % 4:
            assert text == expected[number]
        else:
            assert expected[number].startswith(text)
    assert asyncio.run(ask(1)) == expected[1]  # and the server goes on


@pytest.mark.slow
def test_a_response_format_is_followed(client, served: tuple[str, str]):
    for name in ("outlines", "llguidance"):
        pytest.importorskip(name)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = client.chat.completions.create(
        model=served[1], messages=CHAT, response_format=response_format, max_tokens=60
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"ok"}
    free = client.chat.completions.create(
        model=served[1], messages=CHAT, response_format={"type": "text"}, max_tokens=8
    )
    assert free.choices[0].message.content


@pytest.mark.slow
def test_transformers_chat(served: tuple[str, str], pair: DraftTargetPair, tmp_path: Path):
    """The chat of transformers on the command line, with two messages and its own commands."""
    address, model = served
    code = "from transformers.cli.transformers import main; main()"
    flags = ["do_sample=False", "max_new_tokens=12", "pad_token_id=1"]
    done = subprocess.run(
        [sys.executable, "-c", code, "chat", model, address, *flags],
        input="sort a list\n!status\n!exit\n",
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "200", "TERM": "dumb", "HF_HUB_OFFLINE": "0"},  # it asks this server alone
    )
    assert done.returncode == 0, done.stderr
    expected = plain(pair, CHAT, do_sample=False, max_new_tokens=12, pad_token_id=1)
    assert expected.split()[0] in done.stdout
    assert "12 tokens in" in done.stdout
