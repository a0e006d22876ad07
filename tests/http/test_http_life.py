"""Start and end of a server: refusals that say what would work, keys, drain."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import echo_model
from servers import ECHO, ServerProcess

ALICE = {"authorization": "Bearer alice-key-1"}
BOB = {"authorization": "Bearer bob-key-1"}


def _refusal(model: Path, log: Path, **options: Any) -> str:
    """What a server that does not start says."""
    with pytest.raises(AssertionError, match="did not start"), ServerProcess(model, log, **options):
        pass
    return log.read_text()


def test_a_port_in_use(demo_model_path: Path, logs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started_s = time.monotonic()
        text = _refusal(echo_model(logs, demo_model_path), logs / "port.log", module=ECHO, port=port)
    assert f"PortInUse: port {port} on 127.0.0.1 is in use" in text
    assert "Traceback" not in text
    assert time.monotonic() - started_s < 10


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host": "no.such.host.invalid"}, "ConfigError: --host"),
        ({"api_keys": "/nonexistent"}, "ConfigError: --api-keys"),
        ({"chat_template": "/nonexistent"}, "ConfigError: --chat-template"),
    ],
)
def test_options_that_cannot_be_meant(demo_model_path: Path, logs: Path, options: dict[str, str], says: str) -> None:
    text = _refusal(echo_model(logs, demo_model_path), logs / "refused.log", module=ECHO, **options)
    assert says in text
    assert "Traceback" not in text


def test_models_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "echo").write_bytes(b"GGUF" + b"\xff" * 100)
    text = _refusal(tmp_path / "echo", tmp_path / "log", module=ECHO)
    assert "ModelCorrupt" in text or "ModelUnsupported" in text
    assert "Traceback" not in text


def test_keys_strict_fields_and_body_limit(demo_model_path: Path, logs: Path) -> None:
    keys = logs / "keys.json"
    keys.write_text(json.dumps({"alice-key-1": "alice", "bob-key-1": "bob"}))
    options: dict[str, Any] = {"api_keys": str(keys), "strict_fields": True, "max_body_bytes": 2048}
    with ServerProcess(echo_model(logs, demo_model_path), logs / "keys.log", module=ECHO, **options) as server:
        for path in ("/v1/models", "/metrics", "/version", "/tokenizer_info", "/nope", "/v1/models/demo"):
            answer = server.client.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.json()["error"]["type"] == "authentication_error"
        assert server.client.post("/tokenize", json={"prompt": "x"}).status_code == 401
        assert server.client.post("/v1/completions", json={"prompt": "x"}, headers={"authorization": "Bearer nope-nope"}).status_code == 401
        for path in ("/livez", "/readyz", "/health"):
            assert server.client.get(path).status_code == 200
        for who in (ALICE, BOB):
            assert server.client.post("/v1/completions", json={"prompt": "x"}, headers=who).status_code == 200
        assert server.client.get("/nope", headers=ALICE).status_code == 404
        stream = server.client.post("/v1/completions", json={"prompt": "x", "stream": True}, headers=ALICE).text
        assert '"obfuscation"' in stream, "on by default where tenants share a server"
        strict = server.client.post("/v1/completions", json={"prompt": "x", "frob": 1}, headers=BOB)
        assert (strict.status_code, strict.json()["error"]["param"]) == (400, "frob")
        assert server.client.post("/v1/completions", json={"prompt": "x" * 3000}, headers=BOB).status_code == 413
        assert server.client.post("/v1/completions", json={"prompt": "x" * 1000}, headers=BOB).status_code == 200
        keys.write_text(json.dumps({"bob-key-1": "bob"}))
        server.process.send_signal(signal.SIGHUP)
        deadline_s = time.monotonic() + 5
        while server.client.get("/v1/models", headers=ALICE).status_code == 200 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert server.client.get("/v1/models", headers=ALICE).status_code == 401
        assert server.client.get("/v1/models", headers=BOB).status_code == 200
        assert "alice-key-1" not in server.text


def test_drain(demo_model_path: Path, logs: Path) -> None:
    """SIGTERM: the open stream runs to its end, new requests hear of it, then the process ends with status 0."""
    with ServerProcess(echo_model(logs, demo_model_path, "echo-slow"), logs / "drain.log", module=ECHO) as server:
        seen: list[str] = []
        started = threading.Event()

        def read() -> None:
            body = {"prompt": "x", "max_tokens": 30, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as stream:
                for line in stream.iter_lines():
                    seen.append(line)
                    started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(10)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = server.client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert server.client.get("/readyz").status_code == 503
        assert server.client.get("/livez").status_code == 200
        reader.join(20)
        assert "data: [DONE]" in seen
        assert server.process.wait(10) == 0


def test_drain_gives_up_after_its_timeout(demo_model_path: Path, logs: Path) -> None:
    options = {"drain_timeout_s": 0.5}
    with ServerProcess(echo_model(logs, demo_model_path, "echo-slow"), logs / "drain2.log", module=ECHO, **options) as server:
        body = {"prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "error" in json.loads(rest[-1][6:])
        assert "data: [DONE]" not in rest
        assert server.process.wait(10) == 0


def test_a_second_signal_ends_it_at_once(demo_model_path: Path, logs: Path) -> None:
    with ServerProcess(echo_model(logs, demo_model_path, "echo-slow"), logs / "twice.log", module=ECHO) as server:
        body = {"prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert server.process.poll() is None, "it waits for the open stream"
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
            assert json.loads(rest[-1][6:])["error"]["code"] == "draining", "the open stream hears of it, and nothing has died"
        assert server.process.wait(10) == 0
        assert "Traceback" not in server.text


def test_a_deadline(demo_model_path: Path, logs: Path) -> None:
    with ServerProcess(demo_model_path, logs / "deadline.log", engine={"pool_tokens": 1024}, request_timeout_s=0.3) as server:
        answer = server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 900, "ignore_eos": True})
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert answer.json()["error"]["type"] == "timeout_error"
