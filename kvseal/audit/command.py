"""``kvseal audit``: reads the command line, runs the audit, writes the reports.

Owns flags, help and exit statuses (0 clean, 1 findings, 2 could not audit). Keys come from files or the environment of the caller's shell
through ``@FILE``; a key never reaches a report.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import ssl
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

from kvseal.audit.budget import Allowance
from kvseal.audit.client import ClientSettings
from kvseal.audit.findings import Report
from kvseal.audit.probes.base import Depth
from kvseal.audit.probes.offline import Shown
from kvseal.audit.report import html as html_report
from kvseal.audit.report import json as json_report
from kvseal.audit.report import junit, sarif, terminal
from kvseal.audit.runner import NAMES, AuditSettings, Plan, audit, audit_offline, plan
from kvseal.audit.shown import read_shown

_RENDERERS = {"json": json_report.render, "junit": junit.render, "sarif": sarif.render, "html": html_report.render}

_EPILOG = """\
examples:
  kvseal audit http://localhost:8000/v1 --dry-run           what would be sent, and how much of it
  kvseal audit http://localhost:8000/v1                     everything, within 2000 requests, 1M tokens, 30 minutes
  kvseal audit https://llm.example/v1 --keys @a.key @b.key  two tenants: is one's cache closed to the other?
  kvseal audit http://localhost:8000/v1 --only limits,leak --html report.html --junit report.xml
  kvseal audit --log serve.log --packages freeze.txt        no server asked: only what you show it

Audit only servers that are yours, or whose owner agreed: the probes send oversize prompts, hang up in the middle of answers,
and look for other people's text. All prompts are synthetic; nothing of yours is in a report, and keys appear as digests.

exit status: 0 nothing found, 1 findings, 2 could not audit (nobody answered, or a probe did not come to its end).
A clean audit says what was tried and how sure it is. It is not a proof that a server cannot leak.
"""


def main(argv: list[str]) -> int:
    """Runs ``kvseal audit`` with the arguments after that word; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        _check_reports(options)
        shown = read_shown(options.log, options.metrics, options.packages, options.context)
        if not options.url:
            if not shown.anything():
                parser.error("give the URL of a server, or something to look at: --log, --metrics or --packages")
            report = audit_offline(shown)
            return _write(options, report)
        settings = _settings(options, shown)
    except (ValueError, OSError) as error:
        print(f"kvseal audit: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        return 0 if _say(_plan_text(asyncio.run(plan(settings)), settings)) else 2
    bar = _Bar(sys.stderr.isatty() and not options.quiet)
    report = asyncio.run(_until_told(settings, bar))
    bar.clear()
    return _write(options, report)


async def _until_told(settings: AuditSettings, bar: _Bar) -> Report:
    """The audit. A CI job that is ended, or a terminal that goes, ends it as Ctrl-C does: with what was found until then."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    mine = threading.current_thread() is threading.main_thread()
    signals = [number for number in (signal.SIGTERM, signal.SIGHUP) if mine and signal.getsignal(number) is signal.SIG_DFL]

    def stop() -> None:
        for number in signals:  # The next one ends the process at once.
            loop.remove_signal_handler(number)
        if task is not None:
            task.cancel()

    for number in signals:
        loop.add_signal_handler(number, stop)
    return await audit(settings, bar.show)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvseal audit",
        description="Can it happen to your server? A black-box audit of any OpenAI-compatible endpoint, its log, metrics and packages.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", nargs="?", default="", help="base address, the one that ends in /v1")
    parser.add_argument("--model", default="", metavar="NAME", help="which model to ask (default: the first that the server lists)")
    parser.add_argument("--keys", nargs="+", default=[], metavar="KEY", help="API keys, one for each tenant; @FILE reads a key from a file")
    parser.add_argument("--context", type=_count, metavar="TOKENS", help="the context the server promises, if it does not say so itself")
    parser.add_argument("--only", default="", metavar="PROBES", help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--depth", choices=[d.name.lower() for d in Depth], default="normal", help="how often each test is repeated")
    parser.add_argument("--concurrency", type=_places, default=4, metavar="N", help="never more requests at once than this (default 4)")
    parser.add_argument("--budget", default="", metavar="LIMITS", help="e.g. requests=500,tokens=200k,minutes=10 (default 2000, 1M, 30)")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="how long one request may take before it counts as hung"
    )
    parser.add_argument(
        "--no-logprobs", action="store_true", help="do not ask for logprobs, where they make a server very slow (proves less)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and its cost; generate nothing")
    parser.add_argument("--seed", type=int, default=0, help="repeat an audit's prompts (its report names the seed)")
    parser.add_argument("--insecure", action="store_true", help="do not check the TLS certificate")
    parser.add_argument("--ca", metavar="FILE", help="check the TLS certificate against this authority (PEM)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    own = parser.add_argument_group("what an operator can show")
    own.add_argument("--log", metavar="FILE", help="the engine's start-up log: pool against context, settings, version")
    own.add_argument("--metrics", metavar="FILE", help="saved Prometheus metrics (a running server's own are read anyway)")
    own.add_argument("--packages", metavar="FILE", help="output of pip freeze on the server, or the word env for this environment")
    out = parser.add_argument_group("reports (the terminal summary is always printed)")
    for form in _RENDERERS:
        out.add_argument(f"--{form}", metavar="FILE", help=f"write the report as {form.upper()}")
    return parser


def _count(text: str, most: int = 10**15) -> int:
    value = int(text)
    if not 1 <= value <= most:
        raise argparse.ArgumentTypeError(f"must be at least 1, and at most {most}")
    return value


def _places(text: str) -> int:
    return _count(text, 1_000)


def _settings(options: argparse.Namespace, shown: Shown) -> AuditSettings:
    """Raises ValueError or OSError with a message for the user."""
    url = options.url.rstrip("/")
    try:
        parts = urlsplit(url)
        port = 1 if parts.port is None else parts.port
    except ValueError as error:
        raise ValueError(f"{options.url!r} is not an address ({error}): write http://HOST:PORT/v1") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{options.url!r} is not an address: write http://HOST:PORT/v1")
    if not port or parts.query or parts.fragment:
        raise ValueError(f"{options.url!r} is not an address: write http://HOST:PORT/v1 and nothing behind it")
    if parts.path.endswith(("/completions", "/models", "/responses")):
        raise ValueError(f"give the base address, which ends before {parts.path.rpartition('/v1')[2] or parts.path}")
    if parts.username or parts.password:
        raise ValueError("write keys with --keys, not into the address: addresses end up in reports")
    only = tuple(filter(None, (name.strip() for name in options.only.split(","))))
    if options.only and not only:
        raise ValueError(f"--only names no probe; there are: {', '.join(NAMES)}")
    unknown = [name for name in only if name not in NAMES]
    if unknown:
        raise ValueError(f"no probe is called {unknown[0]!r}; there are: {', '.join(NAMES)}")
    if not (math.isfinite(options.timeout) and options.timeout > 0):
        raise ValueError("--timeout must be a number of seconds above 0")
    _check_authority(options.ca)
    client = ClientSettings(
        url=url,
        model=options.model,
        keys=_keys(options.keys),
        concurrency=options.concurrency,
        timeout_s=options.timeout,
        verify=not options.insecure,
        ca_file=options.ca,
    )
    return AuditSettings(
        client=client,
        model=options.model,
        context_tokens=options.context,
        allowance=Allowance.parse(options.budget),
        depth=Depth[options.depth.upper()],
        only=only,
        seed=options.seed,
        fresh=options.seed == 0,
        shown=shown,
        logprobs=not options.no_logprobs,
    )


def _keys(words: list[str]) -> tuple[str, ...]:
    """The keys themselves. What a header cannot hold is refused here, and never shown: libraries put it into their messages."""
    keys = [_key(word) for word in words]
    for number, (word, key) in enumerate(zip(words, keys, strict=True), 1):
        name = f"the file {word[1:]}" if word.startswith("@") else f"word {number}"
        if not key:
            raise ValueError(f"--keys: {name} holds no key")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError(f"--keys: {name} is no key: one word of ASCII letters is due")
    if len(set(keys)) < len(keys):
        raise ValueError("--keys: one key is given twice; give one of each tenant, for to itself no tenant is a stranger")
    return tuple(keys)


def _key(word: str) -> str:
    if not word.startswith("@"):
        return word
    try:
        return Path(word[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--keys: the file {word[1:]} cannot be read: {error}") from error


def _check_authority(path: str | None) -> None:
    """Raises ValueError, naming the flag, for a file that is no authority."""
    try:
        if path is not None:
            ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ValueError(f"--ca: {path} holds no certificate that can be read: {error.strerror or error}") from error


def _check_reports(options: argparse.Namespace) -> None:
    """Before half an hour of audit rather than after it: can the reports be written? Raises ValueError, naming the flag."""
    for form in _RENDERERS:
        path = vars(options)[form]
        if path and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK)):
            raise ValueError(f"--{form}: {path} cannot be written: is it a file in a folder that is there and yours?")


def _plan_text(made: Plan, settings: AuditSettings) -> str:
    lines = [f"Plan for {settings.client.url} (nothing was generated)", ""]
    if made.guessed:
        lines.append(f"  guessed, since {terminal.shown(made.guessed)}")
    lines += [
        f"  {name:<20} {terminal.shown(value)}"
        for name, value in made.target.describe().items()
        if name in ("model", "engine", "context", "KV pool")
    ]
    lines += ["", f"  {'probe':<12} {'requests':>9} {'tokens':>10}  at most"]
    for probe, cost in made.parts:
        lines.append(f"  {probe.name:<12} {cost.requests:>9} {cost.tokens:>10}  {probe.title}")
    total, limit = made.total, settings.allowance
    lines.append(f"  {'in all':<12} {total.requests:>9} {total.tokens:>10}  never more than {settings.client.concurrency} at once")
    lines += ["", f"  budget: {limit}"]
    if total.requests > limit.requests or total.tokens > limit.tokens:
        lines.append(
            "  The plan may not fit in the budget: the probes at its end would then be left out. Use --only, --depth quick or --budget."
        )
    return "\n".join(lines) + "\n"


class _Bar:
    """A progress bar on the terminal, one line of its width; or nothing."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown

    def show(self, what: str, share: float) -> None:
        if self._shown:
            full = round(24 * share)
            line = f"[{'=' * full}{' ' * (24 - full)}] {100 * share:3.0f} %  {terminal.shown(what)}"
            print(f"\r\x1b[K{line[: _columns() - 1]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


def _write(options: argparse.Namespace, report: Report) -> int:
    """Writes the files and prints the summary; letters that an encoding lacks (servers send lone surrogates) become escapes. The files come
    first: whoever reads the summary may be gone.

    Returns the exit status: the report's, or 2 when something could not be written.
    """
    given, status = vars(options), report.exit_status
    for form, render in _RENDERERS.items():
        try:
            if path := given[form]:
                Path(path).write_text(render(report), encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            print(f"kvseal audit: --{form}: {given[form]} cannot be written: {error.strerror}", file=sys.stderr)
            status = 2
    colour = sys.stdout is not None and sys.stdout.isatty()
    return status if _say(terminal.render(report, colour=colour)) else 2


def _say(text: str) -> bool:
    """Prints `text`, in whatever encoding standard output has. False, and a word on standard error, where it cannot be written."""
    try:
        if sys.stdout is not None:  # It is None where a shell has closed it.
            encoding = sys.stdout.encoding or "utf-8"
            print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"kvseal audit: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
