"""A running engine: started, asked, stopped. Over HTTP or over a pipe, the caller sees no difference.

Owns the processes that it starts (each in a group of its own, ended as a group) and the one client that all HTTP servers get: plain
``POST /v1/completions`` with token ids, one connection per request, all at once. A failed request or a wrong number of tokens is
`EngineFailed`: such a run has no score. Never logs a prompt.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from kvseal.bench.peers.catalogue import Launch
from kvseal.bench.peers.setup import reason, with_environment
from kvseal.bench.peers.workload import Call

STOP_TIMEOUT_S = 15.0


class EngineFailed(Exception):
    """It did not start, stopped, or answered something else than was asked. Says which."""


class TooSlow(Exception):
    """It had not answered when its time was up."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one call. `digest` names the tokens, where the engine gives them."""

    seconds: float
    digest: str = ""


class Engine(Protocol):
    about: dict[str, str]
    """version, and what else it says of itself."""
    start_s: float
    """From the start of the process to the first answer."""

    @property
    def pid(self) -> int: ...

    def ask(self, call: Call, *, timeout_s: float) -> Answer:
        """Sends all prompts at once and waits for the last answer. Raises EngineFailed or TooSlow."""

    def stop(self) -> None: ...


def start(launch: Launch, log: Path) -> Engine:
    """Starts it and waits until it answers one token. Raises EngineFailed with what its log says."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    engine: HttpEngine | PipeEngine = HttpEngine(launch, log) if launch.over_http else PipeEngine(launch, log)
    try:
        engine.wait_until_ready(launch.start_timeout_s)
        engine.ask(Call([list(range(20, 28))], 1), timeout_s=launch.start_timeout_s)
    except TooSlow as error:
        engine.stop()
        raise EngineFailed(f"no first answer within {launch.start_timeout_s:.0f} s; see {log}") from error
    except BaseException:
        engine.stop()
        raise
    engine.start_s = time.perf_counter() - began
    return engine


class _Process:
    """One child in a group of its own."""

    def __init__(self, command: Sequence[str], log: Path, *, piped: bool) -> None:
        self._log = log
        pipe = subprocess.PIPE if piped else None
        with log.open("wb") as output:
            out = pipe if piped else output
            try:
                self.child = subprocess.Popen(
                    command, stdin=pipe or subprocess.DEVNULL, stdout=out, stderr=output, start_new_session=True, text=False
                )
            except OSError as error:
                raise EngineFailed(f"cannot be started: {error}") from error

    def failure(self, what: str) -> EngineFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(10.0)
        status = self.child.poll()
        ended = f"{what}; it ended with status {status}: {reason(self._log)}" if status is not None else f"{what}; see {self._log}"
        return EngineFailed(ended)

    def stop(self) -> None:
        """Ends the group: asked first, then forced."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(STOP_TIMEOUT_S)
                return


class HttpEngine:
    """An OpenAI-compatible server that it starts on a free port of this machine."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self._port = _free_port()
        command = [part.replace("{port}", str(self._port)) for part in with_environment(launch.environment, launch.command)]
        self._process = _Process(command, log, piped=False)
        self._client = Client(self._port, length_field=launch.length_field, gives_tokens=launch.gives_tokens)
        self.about: dict[str, str] = {}
        self.start_s = 0.0

    @property
    def pid(self) -> int:
        return self._process.child.pid

    def wait_until_ready(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self._process.child.poll() is not None:
                raise self._process.failure("did not start")
            if self._client.is_ready():
                self._client.find_model()
                self.about = self._client.about()
                return
            time.sleep(0.05)
        raise TooSlow

    def ask(self, call: Call, *, timeout_s: float) -> Answer:
        try:
            return self._client.ask(call, timeout_s=timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise self._process.failure(f"a request failed ({type(error).__name__})") from error

    def stop(self) -> None:
        self._client.close()
        self._process.stop()


class Client:
    """The client that every server gets."""

    def __init__(self, port: int, *, length_field: str = "ignore_eos", gives_tokens: bool = False, threads: int = 64) -> None:
        self._port = port
        self._length_field = length_field
        self._gives_tokens = gives_tokens
        self._model = ""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="client")

    def is_ready(self) -> bool:
        try:
            return self._exchange("GET", "/health", None, timeout_s=5.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def find_model(self) -> None:
        """Requests name the model that the server lists first."""
        status, body = self._exchange("GET", "/v1/models", None, timeout_s=30.0)
        if status != 200 or not body.get("data"):
            raise EngineFailed(f"GET /v1/models was answered with status {status} and no model")
        self._model = str(body["data"][0]["id"])

    def about(self) -> dict[str, str]:
        """The version, from whichever route this server tells it on."""
        for path, field in (("/version", "version"), ("/props", "build_info")):
            try:
                status, body = self._exchange("GET", path, None, timeout_s=30.0)
            except EngineFailed:  # No JSON: no such route.
                continue
            if status == 200 and isinstance(body.get(field), str):
                return {"version": str(body[field])}
        return {}

    def ask(self, call: Call, *, timeout_s: float) -> Answer:
        bodies = [self._body(prompt, call.output_tokens) for prompt in call.prompts]
        end = time.monotonic() + timeout_s
        began = time.perf_counter()
        futures = [self._threads.submit(self._one, body, call.output_tokens, end) for body in bodies]
        tokens = [future.result() for future in futures]
        seconds = time.perf_counter() - began
        known = all(answer is not None for answer in tokens)
        return Answer(seconds, hashlib.sha256(json.dumps(tokens).encode()).hexdigest() if known else "")

    def _one(self, body: bytes, output_tokens: int, end: float) -> list[int] | None:
        try:
            status, answer = self._exchange("POST", "/v1/completions", body, timeout_s=max(0.01, end - time.monotonic()))
        except TimeoutError as error:
            raise TooSlow from error
        if status != 200:
            raise EngineFailed(f"POST /v1/completions was answered with status {status}: {_error_text(answer)}")
        found = answer.get("usage", {}).get("completion_tokens")
        if found != output_tokens:
            raise EngineFailed(f"{found} tokens came where {output_tokens} were asked for")
        ids = answer["choices"][0].get("token_ids")
        return ids if isinstance(ids, list) else None

    def _body(self, prompt: list[int], output_tokens: int) -> bytes:
        fields: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0}
        fields[self._length_field] = output_tokens if self._length_field == "min_tokens" else True
        if self._gives_tokens:
            fields["return_token_ids"] = True
        return json.dumps(fields).encode()

    def _exchange(self, method: str, path: str, body: bytes | None, *, timeout_s: float) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        try:
            answer = json.loads(text) if text else {}
        except ValueError as error:
            raise EngineFailed(f"{method} {path} was answered with something that is no JSON (status {response.status})") from error
        return response.status, answer if isinstance(answer, dict) else {}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class PipeEngine:
    """A Python API behind `worker`."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self._process = _Process(with_environment(launch.environment, launch.command), log, piped=True)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self.about: dict[str, str] = {}
        self.start_s = 0.0

    @property
    def pid(self) -> int:
        return self._process.child.pid

    def wait_until_ready(self, timeout_s: float) -> None:
        self.about = {name: str(value) for name, value in self._line(timeout_s).items()}

    def ask(self, call: Call, *, timeout_s: float) -> Answer:
        line = json.dumps({"prompts": call.prompts, "output_tokens": call.output_tokens}).encode() + b"\n"
        began = time.perf_counter()
        try:
            self._pipe(self._process.child.stdin).write(line)
            self._pipe(self._process.child.stdin).flush()
        except OSError as error:
            raise self._process.failure("took no request") from error
        answer = self._line(timeout_s)
        seconds = time.perf_counter() - began
        if "error" in answer:
            raise EngineFailed(str(answer["error"])[:300])
        if answer.get("counts") != [call.output_tokens] * len(call.prompts):
            raise EngineFailed(f"{answer.get('counts')} tokens came where {call.output_tokens} each were asked for")
        return Answer(seconds, str(answer.get("digest", "")))

    def stop(self) -> None:
        self._process.stop()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _line(self, timeout_s: float) -> dict[str, Any]:
        waiting = self._reader.submit(self._pipe(self._process.child.stdout).readline)
        try:
            line = waiting.result(timeout_s)
        except TimeoutError as error:
            raise TooSlow from error
        try:
            found = json.loads(line)
        except ValueError as error:
            raise self._process.failure("answered nothing" if not line else "answered something that is no JSON") from error
        if not isinstance(found, dict):
            raise EngineFailed("answered something that is no object")
        return found

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise EngineFailed("has no pipe")
        return pipe


def _error_text(answer: dict[str, Any]) -> str:
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:200]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
