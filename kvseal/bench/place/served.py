"""Real servers under a load of the simulator: ``kvseal serve`` processes, and a client that keeps the same records.

Owns the processes (started on free ports of this machine, ended at the end) and the client: token-id prompts over ``/v1/completions``,
streamed, arrivals by the clock, each request to the server with the fewest outstanding tokens. A request that ends in any other way than
complete counts as refused. Never simulates.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from kvseal.bench.place.routing import answer_work
from kvseal.bench.place.slo import Record
from kvseal.bench.place.tally import Tally
from kvseal.bench.place.trace import Job

START_TIMEOUT_S = 120.0


class ServerFailed(Exception):
    """A server did not start, or went away."""


@contextmanager
def servers(commands: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """One server for each module with its arguments, as ``["kvseal", "serve", ...]``; yields their addresses when all are ready."""
    running: list[subprocess.Popen[bytes]] = []
    urls: list[str] = []
    try:
        for arguments in commands:
            port = _free_port()
            command = [sys.executable, "-P", "-m", *arguments, "--port", str(port), "--log-level", "error"]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            urls.append(f"http://127.0.0.1:{port}")
        for process, url in zip(running, urls, strict=True):
            _wait_for(process, url)
        yield urls
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def run_served(urls: Sequence[str], jobs: Sequence[Job], *, seed: int = 0, patience_s: float = math.inf) -> list[Record]:
    """All jobs at their times from now, to their ends; what is open `patience_s` after the last has come is cut off, and not complete."""
    return asyncio.run(_run(urls, jobs, random.Random(seed), patience_s))


async def _run(urls: Sequence[str], jobs: Sequence[Job], chance: random.Random, patience_s: float) -> list[Record]:
    tally = Tally(jobs, None, None)
    outstanding = dict.fromkeys(urls, 0)
    prompts = [[chance.randrange(100, 40_000) for _ in range(job.prompt_tokens)] for job in jobs]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        models = {url: str((await client.get(f"{url}/v1/models")).json()["data"][0]["id"]) for url in urls}
        start_s = time.monotonic()

        async def one(index: int, job: Job) -> None:
            await asyncio.sleep(max(0.0, start_s + job.at_s - time.monotonic()))
            url = min(urls, key=lambda url: outstanding[url])
            outstanding[url] += answer_work(job)
            body = {"model": models[url], "prompt": prompts[index], "max_tokens": job.output_tokens} | _GREEDY
            try:
                await _stream(client, f"{url}/v1/completions", body, tally, index, start_s)
            except (httpx.HTTPError, ServerFailed):
                tally.refused(index)
            finally:
                outstanding[url] -= answer_work(job)

        tasks = [asyncio.create_task(one(index, job)) for index, job in enumerate(jobs)]
        last_s = jobs[-1].at_s if jobs else 0.0
        ended, late = await asyncio.wait(tasks, timeout=None if patience_s == math.inf else last_s + patience_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task in ended:
            task.result()
    return tally.records


_GREEDY = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


async def _stream(client: httpx.AsyncClient, url: str, body: dict[str, object], tally: Tally, index: int, start_s: float) -> None:
    """A chunk of the stream is a token, wherever its text was complete; what is missing is counted when the usage comes."""
    record = tally.records[index]
    async with client.stream("POST", url, json=body) as answer:
        if answer.status_code != 200:
            raise ServerFailed(f"status {answer.status_code}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now_s = time.monotonic() - start_s
            chunk = json.loads(line[6:])
            usage = chunk.get("usage")
            if usage:
                missing = int(usage["completion_tokens"]) - record.produced
                if missing > 0:
                    tally.tokens(index, now_s, missing)
            elif chunk.get("choices") and record.produced < record.output_tokens:
                tally.token(index, now_s)
    if not record.done:
        raise ServerFailed("the answer is shorter than asked for")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_for(process: subprocess.Popen[bytes], url: str) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise ServerFailed(f"kvseal serve ended with status {process.returncode}; its reason stands on standard error")
        try:
            if httpx.get(f"{url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise ServerFailed(f"kvseal serve was not ready within {START_TIMEOUT_S:.0f} s")
