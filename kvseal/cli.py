"""The command line: one word for each thing that KVSeal does.

Owns flags, their help and exit statuses (0 done, 1 a negative finding, 2 it cannot be done as asked). Imports the rest of the house only
inside the command that needs it, so that ``kvseal --help`` and ``kvseal size`` stay instant. Has no flag that turns a check off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvseal import __version__
from kvseal.bench.suite.names import BENCHMARKS, BENCHMARKS_HELP
from kvseal.core.config import (
    BACKENDS,
    KV_DTYPES,
    ON_HANDOFF_FAILURE,
    PAGE_TOKENS,
    ROLES,
    TRANSPORTS,
    WEIGHT_FORMATS,
    EngineConfig,
    FleetConfig,
    NodeConfig,
    ServeConfig,
    TLSFiles,
    WorkerConfig,
    read_secret,
)
from kvseal.core.errors import ConfigError, KVSealError

_MAIN_EPILOG = """\
examples:
  kvseal serve                                  talk to the demo model at http://127.0.0.1:8000/v1
  kvseal serve ~/models/Qwen3-8B                a directory with config.json and *.safetensors
  kvseal serve model.gguf --kv-memory 4GiB      a GGUF file, with 4 GiB of KV cache
  kvseal run "Why is the sky blue?"             one answer in the terminal
  kvseal size config.json --context 131072      how much KV cache a model needs
  kvseal audit http://host:8000/v1 --model NAME whether a server keeps its promises
  kvseal place --trace FILE --slo ttft=2,tpot=0.1 --workers 8
Each command has its own help: kvseal serve --help
"""

_SERVE_EPILOG = """\
examples:
  kvseal serve
  kvseal serve HuggingFaceTB/SmolLM2-1.7B-Instruct --kv-memory 2GiB
  kvseal serve model.gguf --context-tokens 8192     refuses to start unless the pool really holds 8192 tokens
  kvseal serve --api-keys keys.json --host 0.0.0.0

then:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'

The pool is what all requests share; the context is what one request may use (prompt and output together). The server
advertises the smaller of what the model promises and what the pool holds, and refuses longer requests before it touches a page.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``kvseal`` command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except KVSealError as error:
        print(f"kvseal: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["size"]:  # The planner and the auditor stand alone, each with its own parser.
        from kvseal.plan.command import main as size_main

        return size_main(arguments[1:])
    if arguments[:1] == ["audit"]:
        from kvseal.audit.command import main as audit_main

        return audit_main(arguments[1:])
    if arguments[:1] == ["place"]:
        from kvseal.bench.place.command import main as place_main

        return place_main(arguments[1:])
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvseal",
        description="A language-model server whose KV cache cannot leak: every page bears a seal that every read checks.",
        epilog=_MAIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvseal {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_worker(commands)
    _add_route(commands)
    _add_run(commands)
    _add_bench(commands)
    commands.add_parser("size", help="how much KV cache a model needs, what a pool holds, whether a promised context is true")
    commands.add_parser("place", help="how to place workers for a load: colocated, or prefill and decode apart")
    commands.add_parser("audit", help="whether any OpenAI-compatible server truncates, leaks or lies")
    return parser


Commands = argparse._SubParsersAction  # argparse offers no public name for it.


def _add_serve(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server",
        description="Starts an OpenAI-compatible server.",
        epilog=_SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="directory, .gguf file, or hub id; default: the demo model, fetched once")
    _add_engine_options(parser)
    _add_fleet_options(parser)
    _add_http_options(parser)
    parser.set_defaults(command=_serve)


def _add_http_options(parser: argparse.ArgumentParser) -> None:
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    http.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)")
    http.add_argument("--served-model-name", metavar="NAME", help="what the API calls the model (default: from MODEL)")
    http.add_argument("--api-keys", type=Path, metavar="FILE", help="keys and their tenants; prefixes are shared inside a tenant only")
    http.add_argument("--chat-template", type=Path, metavar="FILE", help="jinja2 template instead of the model's own")
    http.add_argument("--strict-fields", action="store_true", help="answer 400 to unknown request fields instead of listing them")
    http.add_argument("--max-body", type=_bytes, default=4 * 2**20, metavar="BYTES", help="largest request body (default: 4MiB)")
    http.add_argument("--request-timeout", type=float, metavar="SECONDS", help="deadline of every request (default: none)")
    http.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="SECONDS", help="on SIGTERM, time for open requests to finish (default: 30)"
    )
    http.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="never logs content")


def _add_worker(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "worker", help="one node of several, for routers on other machines", description="Starts one node that a router can use."
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="directory, .gguf file, or hub id; default: the demo model, fetched once")
    parser.add_argument("--role", choices=ROLES, required=True, help="compute prompts, or answer")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="an address of this machine that router and nodes reach")
    parser.add_argument("--name", help="what metrics and logs call it (default: role and address)")
    parser.add_argument("--http", metavar="HOST:PORT", help="also an HTTP API, for a front that speaks kv_transfer_params")
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help="with --http: keys and their tenants, as of kvseal serve")
    parser.add_argument("--transport", choices=TRANSPORTS, help="how pages go (default: tcp); nixl: RDMA, or loopback")
    _add_link_options(parser)
    _add_engine_options(parser)
    parser.set_defaults(command=_worker)


def _add_route(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "route", help="an OpenAI-compatible server in front of workers", description="Starts an OpenAI-compatible server over workers."
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the workers' model; only its tokenizer is read here")
    parser.add_argument("--workers", required=True, metavar="HOST:PORT,...", help="every worker's --listen address")
    _add_link_options(parser)
    _add_http_options(parser)
    parser.set_defaults(command=_route)


def _add_link_options(parser: argparse.ArgumentParser) -> None:
    links = parser.add_argument_group("links")
    links.add_argument("--secret-file", type=Path, required=True, metavar="FILE", help="the secret that router and workers share")
    links.add_argument("--tls-certificate", type=Path, metavar="FILE", help="PEM; with the two below, all links use TLS, both ends proven")
    links.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM, the certificate's key")
    links.add_argument("--tls-authority", type=Path, metavar="FILE", help="PEM, who must have signed the other end's certificate")
    _add_failure_option(links)


def _add_fleet_options(parser: argparse.ArgumentParser) -> None:
    nodes = parser.add_argument_group("several nodes")
    nodes.add_argument("--prefill", type=int, default=0, metavar="N", help="compute prompts on so many nodes of their own")
    nodes.add_argument("--decode", type=int, default=0, metavar="M", help="answer on so many nodes; each node is a process here")
    _add_failure_option(nodes)


def _add_failure_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--on-handoff-failure",
        choices=ON_HANDOFF_FAILURE,
        default="recompute",
        help="compute the prompt again, or 503 (default: %(default)s)",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    memory = parser.add_argument_group("KV cache")
    memory.add_argument("--kv-memory", type=_bytes, metavar="BYTES", help="size of the page pool, e.g. 4GiB (default: from free memory)")
    memory.add_argument("--pool-tokens", type=int, metavar="N", help="size of the page pool in tokens, instead of --kv-memory")
    memory.add_argument("--context-tokens", type=int, metavar="N", help="promise this context, or refuse to start (default: what fits)")
    memory.add_argument("--kv-dtype", choices=KV_DTYPES, default="fp16", help="how K and V are stored (default: %(default)s)")
    memory.add_argument("--page-tokens", type=int, choices=PAGE_TOKENS, default=16, help="tokens in a page (default: %(default)s)")
    memory.add_argument("--wipe-pages", action="store_true", help="also zero pages when they are given back; the seals do not need it")
    compute = parser.add_argument_group("computing")
    compute.add_argument("--weights", choices=WEIGHT_FORMATS, default="auto", help="format that linear layers run in (default: as stored)")
    compute.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads (default: one per core)")
    compute.add_argument("--backend", choices=BACKENDS, default="cpu", help="reference is NumPy: slow, plainly right")
    compute.add_argument("--chunk-tokens", type=int, default=512, metavar="N", help="most new tokens in one step (default: %(default)s)")
    compute.add_argument("--max-running", type=int, default=64, metavar="N", help="most requests in one step (default: %(default)s)")
    compute.add_argument("--max-queued", type=int, default=1024, metavar="N", help="longest waiting line, then 503 (default: %(default)s)")


def _add_run(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("run", help="answer one prompt in the terminal", description="Answers one prompt, streamed, and exits.")
    parser.add_argument("prompt", nargs="?", help="the prompt; read from standard input when missing")
    parser.add_argument("--model", metavar="MODEL", help="directory, .gguf file, or hub id; default: the demo model, fetched once")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: what the context leaves)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy: the same answer every time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="with a temperature: same seed, same answer (default: %(default)s)")
    _add_engine_options(parser)
    parser.set_defaults(command=_run)


def _add_bench(commands: Commands[argparse.ArgumentParser]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser("bench", help="benchmarks of this machine", description=BENCHMARKS_HELP, formatter_class=raw)
    parser.add_argument("name", choices=list(BENCHMARKS), metavar="NAME", help="one of those above")
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="passed on; kvseal bench NAME --help says what it measures"
    )
    rest.required = False  # Or the message about a missing NAME asks for these as well.
    parser.set_defaults(command=_bench)


def _engine_config(options: argparse.Namespace, model: Path) -> EngineConfig:
    return EngineConfig(
        model=model,
        backend=options.backend,
        weights=options.weights,
        kv_dtype=options.kv_dtype,
        page_tokens=options.page_tokens,
        context_tokens=options.context_tokens,
        pool_tokens=options.pool_tokens,
        kv_memory_bytes=options.kv_memory,
        threads=options.threads,
        chunk_tokens=options.chunk_tokens,
        max_running=options.max_running,
        max_queued=options.max_queued,
        wipe_pages=options.wipe_pages,
    )


def _serve(options: argparse.Namespace) -> int:
    from kvseal.node.models import resolve_model
    from kvseal.serve.boot import serve

    path = resolve_model(options.model)
    serve(_serve_config(options, _engine_config(options, path), _fleet_config(options)))
    return 0


def _serve_config(options: argparse.Namespace, engine: EngineConfig, fleet: FleetConfig | None) -> ServeConfig:
    from kvseal.node.models import model_name

    return ServeConfig(
        engine=engine,
        fleet=fleet,
        host=options.host,
        port=options.port,
        served_model_name=options.served_model_name or model_name(options.model, engine.model),
        api_keys=options.api_keys,
        chat_template=options.chat_template,
        strict_fields=options.strict_fields,
        max_body_bytes=options.max_body,
        request_timeout_s=options.request_timeout,
        drain_timeout_s=options.drain_timeout,
        log_level=options.log_level,
    )


def _worker(options: argparse.Namespace) -> int:
    from kvseal.node.channel import address_of, every_address
    from kvseal.node.models import model_name, resolve_model
    from kvseal.serve.worker import run_worker

    if options.api_keys is not None and not options.http:
        raise ConfigError("--api-keys are for the HTTP API of a worker; give --http HOST:PORT as well, or leave them out")
    host, port = address_of(options.listen, "--listen")
    if every_address(host):
        raise ConfigError(f"--listen {options.listen}: give the address that the other nodes reach; they are told it")
    tls = _tls_files(options)
    node = NodeConfig(
        role=options.role,
        name=options.name or f"{options.role}-{options.listen}",
        secret=read_secret(options.secret_file),
        on_failure=options.on_handoff_failure,
        listen=host,
        transport=options.transport,
        tls=tls,
    )
    engine = replace(_engine_config(options, resolve_model(options.model)), node=node)
    http = None
    if options.http:
        http_host, http_port = address_of(options.http, "--http")
        name = model_name(options.model, engine.model)
        http = ServeConfig(engine=engine, host=http_host, port=http_port, served_model_name=name, api_keys=options.api_keys)
    run_worker(WorkerConfig(engine=engine, host=host, port=port, tls=tls, http=http))
    return 0


def _route(options: argparse.Namespace) -> int:
    from kvseal.node.models import resolve_model
    from kvseal.serve.boot import serve

    workers = tuple(part.strip() for part in options.workers.split(",") if part.strip())
    if not workers:
        raise ConfigError("--workers names nobody; give the --listen address of every worker, HOST:PORT,HOST:PORT")
    fleet = FleetConfig(
        workers=workers,
        secret=read_secret(options.secret_file),
        on_failure=options.on_handoff_failure,
        tls=_tls_files(options),
    )
    serve(_serve_config(options, EngineConfig(model=resolve_model(options.model)), fleet))
    return 0


def _tls_files(options: argparse.Namespace) -> TLSFiles | None:
    files = (options.tls_certificate, options.tls_key, options.tls_authority)
    if not any(files):
        return None
    if not all(files):
        raise ConfigError("TLS needs all three of --tls-certificate, --tls-key and --tls-authority")
    return TLSFiles(*files)


def _fleet_config(options: argparse.Namespace) -> FleetConfig | None:
    if not options.prefill and not options.decode:
        return None
    return FleetConfig(prefill=options.prefill, decode=options.decode, on_failure=options.on_handoff_failure)


def _run(options: argparse.Namespace) -> int:
    from kvseal.node.models import resolve_model
    from kvseal.serve.terminal import answer_once

    prompt = options.prompt if options.prompt is not None else _standard_input()
    if not prompt.strip():
        raise ConfigError('the prompt is empty: kvseal run "your question", or pipe it in')
    config = _engine_config(options, resolve_model(options.model))
    return answer_once(
        config,
        prompt,
        system=options.system,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is no valid {error.encoding} (byte {error.start})") from error


def _bench(options: argparse.Namespace) -> int:
    import runpy

    from kvseal.bench.suite.ending import clean_end

    sys.argv = [f"kvseal bench {options.name}", *options.arguments]
    with clean_end():
        runpy.run_module(f"kvseal.bench.{options.name}", run_name="__main__")
    return 0


def _bytes(text: str) -> int:
    """ "4GiB", "512M", "1.5g" or a plain number of bytes. Units are binary."""
    number = text.strip().lower().removesuffix("ib").removesuffix("b")
    factor = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}.get(number[-1:], 1)
    try:
        size = float(number[:-1] if factor > 1 else number) * factor
    except ValueError:
        size = 0.0
    if not 1 <= size < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 512MiB or 4GiB")
    return int(size)


if __name__ == "__main__":
    raise SystemExit(main())
