"""The server's life: report, listen, serve, drain.

Owns start-up and shutdown of the HTTP process. The port is taken before the model is loaded, so that a port in use is known at once. Ready
means ready: one token has gone through the whole engine before the first request is let in. On SIGTERM or SIGINT nothing new is taken,
open requests may finish within ``--drain-timeout``, then the process ends; a second signal ends it at once. SIGHUP reads the keys again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn

from kvseal.core.config import FleetConfig, ServeConfig
from kvseal.core.errors import ConfigError, EngineDied, KVSealError
from kvseal.core.events import EndedEvent
from kvseal.core.files import read_text
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Completed
from kvseal.core.request import Request, SamplingParams
from kvseal.node.client import EngineClient
from kvseal.node.report import StartReport
from kvseal.node.spawn import ENGINE_MODULE, SpawnedEngine
from kvseal.serve.app import Deps, build_app
from kvseal.serve.auth import KeyRing, Scopes
from kvseal.serve.boot import listen
from kvseal.serve.chat_template import ChatTemplate
from kvseal.serve.connection import BoundedConnection
from kvseal.serve.gate import new_id
from kvseal.serve.metrics import Metrics
from kvseal.serve.sampling_defaults import describe, sampling_defaults
from kvseal.serve.served import ServedModel
from kvseal.serve.tokenizer import Tokenizer
from kvseal.serve.tokenizer_files import load_tokenizer

if TYPE_CHECKING:  # Most servers have no nodes beside them, and start sooner without these.
    from kvseal.node.router import Router
    from kvseal.node.transfer_desk import TransferDesk

WARM_UP_TIMEOUT_S = 60.0
MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 75
_log = logging.getLogger("kvseal.server")


def run_server(
    config: ServeConfig,
    *,
    engine_module: str | None = None,
    listener: socket.socket | None = None,
    spawned: SpawnedEngine | None = None,
) -> None:
    """Serves until told to stop. Raises `SetupError` when it cannot start as asked.

    `listener`, `spawned`: the port and the engine process when they are there already (see `boot`).
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    with listener or listen(config.host, config.port) as listening, asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_serve(config, listening, engine_module, spawned))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # Half of what a wake-up costs, and a streamed token is little else; not made for every platform.
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(config: ServeConfig, listener: socket.socket, engine_module: str | None, spawned: SpawnedEngine | None) -> None:
    started_s = time.monotonic()
    own_template, keys = _own_template(config), KeyRing(config.api_keys)  # What can be wrong with them is known before the model is loaded.
    tokenizer, engine = await _load(config, engine_module, spawned)
    try:
        await serve_http(config, listener, tokenizer, engine, own_template, keys, started_s=started_s)
    finally:
        await engine.close()


async def serve_http(
    config: ServeConfig,
    listener: socket.socket,
    tokenizer: Tokenizer,
    engine: EngineClient | Router,
    own_template: str | None,
    keys: KeyRing,
    *,
    started_s: float,
    transfers: TransferDesk | None = None,
    secret: bytes | None = None,
) -> None:
    """The API over an engine that runs, until told to stop. `secret`: for scopes that other servers share (a worker's)."""
    model = _model(config, tokenizer, own_template, engine.report)
    scopes = Scopes(bytes.fromhex(engine.report.kv_format), secret)
    await _warm_up(engine, scopes)
    deps = Deps(
        model=model,
        engine=engine,
        keys=keys,
        scopes=scopes,
        metrics=Metrics(),
        strict_fields=config.strict_fields,
        max_body_bytes=config.max_body_bytes,
        request_timeout_s=config.request_timeout_s,
        transfers=transfers,
    )
    server = _http_server(deps)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    gc.freeze()  # All of this lives as long as the server: later collections need not look at it.
    gc.enable()
    print(start_report(config, model), file=sys.stderr)
    print(f"KVSeal is ready after {time.monotonic() - started_s:.1f} s at {address}/v1", file=sys.stderr, flush=True)
    stopping = _stop_on_signals(server, engine, config.drain_timeout_s)
    _reload_on_hangup(keys)
    await server.serve(sockets=[listener])
    await asyncio.gather(*stopping.tasks, return_exceptions=True)  # A second signal has cancelled the first task.


async def _load(config: ServeConfig, engine_module: str | None, spawned: SpawnedEngine | None) -> tuple[Tokenizer, EngineClient | Router]:
    """The tokenizer is read here while the engine process reads the weights."""
    reading = asyncio.create_task(asyncio.to_thread(load_tokenizer, config.engine.model))
    try:
        engine = await _start(config, engine_module, spawned)
    except BaseException:
        await asyncio.gather(reading, return_exceptions=True)
        raise
    try:
        return await reading, engine
    except BaseException:
        await engine.close()
        raise


async def _start(config: ServeConfig, engine_module: str | None, spawned: SpawnedEngine | None) -> EngineClient | Router:
    if config.fleet is None:
        return await EngineClient.start(config.engine, module=engine_module or ENGINE_MODULE, spawned=spawned)
    from kvseal.node.local import connect_workers, start_local
    from kvseal.node.node_client import NODE_MODULE

    if config.fleet.workers:
        return await connect_workers(config.fleet)
    return await start_local(config.engine, config.fleet, module=engine_module or NODE_MODULE)


def _own_template(config: ServeConfig) -> str | None:
    """What --chat-template names, read before the model is loaded."""
    if config.chat_template is None:
        return None
    try:
        return read_text(config.chat_template)
    except OSError as error:
        raise ConfigError(f"--chat-template: {config.chat_template} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template: {config.chat_template} cannot be read: it is not UTF-8 (byte {error.start})") from error


def _model(config: ServeConfig, tokenizer: Tokenizer, own_template: str | None, report: StartReport) -> ServedModel:
    source = own_template if own_template is not None else tokenizer.chat_template
    template = None if source is None else ChatTemplate(source, tokenizer.special_texts)
    name = config.served_model_name or report.model_name
    defaults = sampling_defaults(config.engine.model)
    return ServedModel(name=name, tokenizer=tokenizer, template=template, report=report, created_s=int(time.time()), defaults=defaults)


async def _warm_up(engine: EngineClient | Router, scopes: Scopes) -> None:
    """One token through everything, in a scope that no request can have. Raises `EngineDied` when it does not come out."""
    request = Request(
        request_id=RequestId(new_id("warmup")),
        prompt_tokens=(engine.report.bos_token or 0,),
        max_output_tokens=1,
        scope=scopes.scope("\0warm-up", new_id("salt")),
        sampling=SamplingParams(temperature=0.0),
    )

    async def run() -> None:
        if not isinstance(engine, EngineClient):
            await engine.prove(request.scope)
        async for event in engine.submit(request):
            if isinstance(event, EndedEvent) and not isinstance(event.outcome, Completed):
                raise EngineDied(f"the first token did not come out of the engine ({type(event.outcome).__name__})")

    try:
        async with asyncio.timeout(WARM_UP_TIMEOUT_S):
            await run()
    except TimeoutError:
        raise EngineDied(f"the engine computed no token within {WARM_UP_TIMEOUT_S:.0f} s of its start") from None


def _http_server(deps: Deps) -> uvicorn.Server:
    config = uvicorn.Config(
        build_app(deps),
        loop="none",
        http=BoundedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: stopping is a matter of draining first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are `_stop_on_signals`'s."""
        yield


class _Stopping:
    """The shutdown that may be under way: draining, then perhaps the end of patience."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []


def _stop_on_signals(server: uvicorn.Server, engine: EngineClient | Router, drain_timeout_s: float) -> _Stopping:
    stopping = _Stopping()

    async def drain() -> None:
        _log.warning("draining: nothing new is taken, %d open sequences have %.0f s to finish", engine.open_requests, drain_timeout_s)
        finished = await engine.drain(drain_timeout_s)
        _log.warning("drained" if finished else "the drain timeout passed; the rest was cancelled")
        server.should_exit = True

    async def end_now() -> None:
        _log.warning("a second signal: %d open sequences end with an error", engine.open_requests)
        await engine.close()
        server.should_exit = True

    def on_signal() -> None:
        if not stopping.tasks:
            stopping.tasks.append(asyncio.create_task(drain()))
        elif len(stopping.tasks) == 1:
            stopping.tasks[0].cancel()
            stopping.tasks.append(asyncio.create_task(end_now()))

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stopping


def _reload_on_hangup(keys: KeyRing) -> None:
    def reload() -> None:
        try:
            keys.reload()
            _log.warning("read the API keys again: %d in force", keys.count)
        except KVSealError as error:
            _log.error("kept the old API keys: %s", error)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


# --- what is said at start ---------------------------------------------------------------------------------


def start_report(config: ServeConfig, model: ServedModel) -> str:
    """The numbers that must agree, for people. /version returns the same ones."""
    report, name = model.report, model.name
    sampling = ", ".join(f"{name} {value:g}" for name, value in describe(model.defaults).items())
    rows = [
        ("model", f"{name} ({report.family}), {report.weights_format} weights, {_size(report.weights_bytes)}"),
        ("compute", f"{report.backend} backend, {report.instruction_set}, {report.threads} threads"),
        ("KV per token", f"{report.kv_token_bytes} bytes = {report.kv_token_formula}"),
        ("KV pool", f"{report.pool_tokens} tokens in {report.pool_pages} pages of {report.page_tokens}, {_size(report.pool_bytes)}"),
        ("KV format", f"{report.kv_format} ({report.kv_dtype}){', pages wiped when given back' if report.wipe_pages else ''}"),
        ("context", f"{report.model_context_tokens} tokens promised by the model"),
        ("served context", f"{report.served_context_tokens} tokens per request, prompt and output together ({report.context_reason})"),
        ("full-length requests", f"{report.full_length_requests} fit at once"),
        ("limits", f"{report.max_running} running, {report.max_queued} queued, {report.chunk_tokens} tokens per step"),
        *([] if config.fleet is None else [("nodes", _nodes(config.fleet))]),
        ("sampling", f"{sampling or 'temperature 1'} unless a request says otherwise"),
        ("bodies", f"{_size(config.max_body_bytes)} at most; request timeout {config.request_timeout_s or 'none'}"),
        ("API keys", "needed" if config.api_keys is not None else "none: whoever reaches the port may use it"),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:<{width}}  {text}" for label, text in rows)


def _size(count: int) -> str:
    """ "94.1 MiB", "1.41 GiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    digits = {"B": 0, "GiB": 2}.get(unit, 1)
    return f"{size:.{digits}f} {unit}"


def _nodes(fleet: FleetConfig) -> str:
    who = (
        f"{len(fleet.workers)} workers"
        if fleet.workers
        else f"{fleet.prefill} for prompts, {fleet.decode} for answers; pool and limits are those for answers"
    )
    return f"{who}; a failed hand-off is {'computed again' if fleet.on_failure == 'recompute' else 'an error'}"
