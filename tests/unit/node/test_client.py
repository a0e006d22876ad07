"""The engine process and its client: one end per stream, deaths survived, hangs seen."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvseal.core.config import EngineConfig
from kvseal.core.errors import ContextLengthExceeded, DeadlineExceeded, Draining, EngineDied, ModelNotFound, PoolTooSmall
from kvseal.core.events import EndedEvent, Event, TokensEvent
from kvseal.core.ids import RequestId, Scope
from kvseal.core.outcome import Cancelled, Completed, Failed, FinishReason, Outcome, Refused
from kvseal.core.request import Request, SamplingParams
from kvseal.lab.rig import SCOPE, truth
from kvseal.node import client as client_module
from kvseal.node.client import EngineClient, EngineState
from kvseal.node.stream import RequestStream

LAB = "kvseal.lab.engine_process"


def request(name: str, *, prompt: tuple[int, ...] = (5, 6, 7), output: int = 4, deadline_s: float | None = None) -> Request:
    return Request(
        request_id=RequestId(name), prompt_tokens=prompt, max_output_tokens=output, scope=Scope(bytes(16)), deadline_s=deadline_s
    )


@asynccontextmanager
async def engine(model: str = "echo", *, stall_after_s: float = 20.0) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(EngineConfig(model=Path(model)), module=LAB, stall_after_s=stall_after_s)
    try:
        yield client
    finally:
        await client.close()


async def read(stream: RequestStream) -> tuple[list[int], Outcome]:
    events: list[Event] = [event async for event in stream]
    end = events[-1]
    assert isinstance(end, EndedEvent)
    assert sum(isinstance(event, EndedEvent) for event in events) == 1
    return [token for event in events if isinstance(event, TokensEvent) for token in event.tokens], end.outcome


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def run(body: Callable[[], Awaitable[None]], *, uvloop: bool = False) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(40):
            await body()

    with asyncio.Runner(loop_factory=new_uvloop if uvloop else None) as runner:
        runner.run(bounded())


def new_uvloop() -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
    return loop


def test_many_requests_each_get_their_own_answer() -> None:
    async def body() -> None:
        async with engine() as client:
            assert client.state is EngineState.READY
            streams = [client.submit(request(f"r{i}", prompt=(i, i + 1), output=5)) for i in range(20)]
            answers = await asyncio.gather(*map(read, streams))
            for i, (tokens, outcome) in enumerate(answers):
                assert tokens == [i, i + 1, i, i + 1, i]
                assert isinstance(outcome, Completed) and outcome.reason is FinishReason.LENGTH
                assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == (2, 5)
            assert client.open_requests == 0
            assert (await client.stats()).outcomes == {"completed": 20}

    run(body)


def test_refusal_deadline_and_cancel_keep_their_types() -> None:
    async def body() -> None:
        async with engine("echo-slow") as client:
            long = client.submit(request("long", output=8_190))
            late = client.submit(request("late", output=1_000, deadline_s=0.2))
            left = client.submit(request("left", output=1_000))
            left.cancel()
            tokens, refused = await read(long)
            assert tokens == [] and isinstance(refused, Refused) and isinstance(refused.error, ContextLengthExceeded)
            assert refused.error.details["prompt_tokens"] == 3
            assert isinstance((await read(left))[1], Cancelled)
            _, failed = await read(late)
            assert isinstance(failed, Failed) and isinstance(failed.error, DeadlineExceeded)

    run(body)


def test_setup_error_reaches_the_caller_with_its_own_text() -> None:
    async def body() -> None:
        with pytest.raises(ModelNotFound, match="no model 'nowhere'"):
            await EngineClient.start(EngineConfig(model=Path("nowhere")), module=LAB)

    run(body)


def test_a_source_tree_in_the_working_directory_is_not_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvseal").mkdir()
    (tmp_path / "kvseal" / "__init__.py").write_text("raise SystemExit('the package of the working directory was run')")
    monkeypatch.chdir(tmp_path)

    async def body() -> None:
        async with engine("echo") as client:
            assert client.state is EngineState.READY

    run(body)


def test_an_engine_that_stops_during_a_drain_is_not_started_again() -> None:
    async def body() -> None:
        async with engine("echo-slow") as client:
            stream = client.submit(request("r", output=20))
            await anext(stream)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGTERM)
            assert await client.drain(10)
            assert isinstance((await read(stream))[1], Completed)
            await until(lambda: client.pid is None)
            await asyncio.sleep(0.3)
            assert client.pid is None and client.restarts == 0

    run(body)


def test_an_engine_that_goes_at_the_moment_of_closing_is_not_started_again() -> None:
    """As after Ctrl-C, which both processes get: the wait for the lost connection swallows the cancellation of whoever waits."""

    async def body() -> None:
        async with engine("echo") as client:
            await asyncio.sleep(0.05)
            assert client._link is not None and client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            client._link.lost.set()
            await asyncio.wait_for(client.close(), 5)
            assert client.state is EngineState.CLOSED and client.pid is None and client.restarts == 0

    run(body)


def test_a_restart_asks_for_the_pool_that_was_advertised() -> None:
    async def body() -> None:
        async with engine("echo") as client:
            assert client._config.pool_tokens == client.report.pool_tokens
            assert client._config.kv_memory_bytes is None

    run(body)


@pytest.mark.parametrize("uvloop", [False, True])
def test_killed_engine_fails_open_requests_at_once_and_is_replaced(uvloop: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with engine("echo-slow") as client:
            open_streams = [client.submit(request(f"r{i}", output=5_000)) for i in range(5)]
            await anext(open_streams[0])
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            for stream in open_streams:
                _, outcome = await asyncio.wait_for(read(stream), 2)
                assert isinstance(outcome, Failed) and isinstance(outcome.error, EngineDied)
            assert client.state is not EngineState.READY
            _, meanwhile = await read(client.submit(request("meanwhile")))
            assert isinstance(meanwhile, Refused) and isinstance(meanwhile.error, EngineDied)
            await until(lambda: client.state is EngineState.READY)
            assert client.restarts == 1
            assert "exit status -9); 5 open requests failed" in caplog.text
            tokens, _ = await read(client.submit(request("again")))
            assert tokens == [5, 6, 7, 5]

    run(body, uvloop=uvloop)


def test_stopped_engine_is_seen_and_continues_or_is_replaced() -> None:
    async def body() -> None:
        async with engine("echo-slow", stall_after_s=0.4) as client:
            stream = client.submit(request("r", output=20))
            await anext(stream)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            await until(lambda: client.state is EngineState.STALLED, 2)
            os.kill(client.pid, signal.SIGCONT)
            await until(lambda: client.state is EngineState.READY, 2)
            assert isinstance((await read(stream))[1], Completed)

            hung = client.submit(request("hung", output=1_000))
            await anext(hung)
            os.kill(client.pid, signal.SIGSTOP)
            _, outcome = await asyncio.wait_for(read(hung), 6)
            assert isinstance(outcome, Failed) and isinstance(outcome.error, EngineDied)
            await until(lambda: client.state is EngineState.READY and client.restarts == 1)

    run(body)


@pytest.mark.parametrize("model", ["echo-law", "echo-bug"])
def test_engine_that_cannot_trust_itself_stops_and_logs_no_content(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        async with engine(model) as client:
            _, outcome = await read(client.submit(request("r", prompt=(31_415, 27_182), output=100)))
            assert isinstance(outcome, Failed) and isinstance(outcome.error, EngineDied)
            await until(lambda: client.state is EngineState.READY and client.restarts == 1)

    run(body)
    log = capfd.readouterr().err
    assert ("LawBroken" if model == "echo-law" else "ValueError at engine_process.py") in log
    assert "31415" not in log and "27182" not in log


def test_hanging_step_is_ended() -> None:
    async def body() -> None:
        async with engine("echo-hang", stall_after_s=0.2) as client:
            _, outcome = await read(client.submit(request("r", output=100)))
            assert isinstance(outcome, Failed) and isinstance(outcome.error, EngineDied)

    run(body)


def test_memory_that_is_not_granted_is_a_setup_error() -> None:
    async def body() -> None:
        with pytest.raises(PoolTooSmall, match="--kv-memory"):
            await EngineClient.start(EngineConfig(model=Path("echo-memory")), module=LAB)

    run(body)


def test_module_that_does_not_exist_is_a_death_before_birth() -> None:
    async def body() -> None:
        with pytest.raises(EngineDied, match="before it was ready"):
            await EngineClient.start(EngineConfig(model=Path("echo")), module="kvseal.lab.nowhere")

    run(body)


def test_reader_that_does_not_read_keeps_nobody_waiting() -> None:
    async def body() -> None:
        async with engine() as client:
            sleepy = client.submit(request("sleepy", output=5_000))
            for i in range(20):
                assert isinstance((await read(client.submit(request(f"r{i}", output=50))))[1], Completed)
            tokens, outcome = await read(sleepy)
            assert len(tokens) == 5_000 and isinstance(outcome, Completed)

    run(body)


def test_ids_of_open_requests_are_not_reused() -> None:
    async def body() -> None:
        async with engine("echo-slow") as client:
            client.submit(request("r", output=100))
            with pytest.raises(ValueError):
                client.submit(request("r"))

    run(body)


def test_idle_engine_uses_no_processor() -> None:
    async def body() -> None:
        async with engine() as client:
            await read(client.submit(request("r")))
            spent = Path(f"/proc/{client.pid}/stat")
            before = sum(map(int, spent.read_text().split()[13:15]))
            await asyncio.sleep(1.0)
            assert sum(map(int, spent.read_text().split()[13:15])) - before <= 3  # hundredths of a second
            assert client.last_progress_age_s < 2.5

    run(body)


def test_whole_engine_behind_the_socket() -> None:
    async def body() -> None:
        client = await EngineClient.start(EngineConfig(model=Path("oracle"), pool_tokens=1_024), module=LAB)
        try:
            prompts = [tuple((i * 31 + at * 7) % 4_000 for at in range(20 + i)) for i in range(12)]
            streams = [
                client.submit(
                    Request(
                        request_id=RequestId(str(i)),
                        prompt_tokens=each,
                        max_output_tokens=20,
                        scope=SCOPE,
                        sampling=SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1 if i % 3 == 0 else None),
                    )
                )
                for i, each in enumerate(prompts)
            ]
            for i, (tokens, outcome) in enumerate(await asyncio.gather(*map(read, streams))):
                assert isinstance(outcome, Completed)
                assert tokens == truth(prompts[i], 20)
            stats = await client.stats()
            assert stats.outcomes["completed"] == 12 and stats.pages_leased == 0
        finally:
            await client.close()

    run(body)


def test_drain_finishes_what_is_open_and_refuses_what_is_new() -> None:
    async def body() -> None:
        async with engine("echo-slow") as client:
            stream = client.submit(request("open", output=6))
            await anext(stream)
            drained = asyncio.create_task(client.drain(5))
            await asyncio.sleep(0)
            _, refused = await read(client.submit(request("new")))
            assert isinstance(refused, Refused) and isinstance(refused.error, Draining)
            assert isinstance((await read(stream))[1], Completed)
            assert await drained

    run(body)


def test_drain_cancels_what_does_not_end_in_time() -> None:
    async def body() -> None:
        async with engine("echo-slow") as client:
            stream = client.submit(request("open", output=8_000))
            assert not await client.drain(0.1)
            assert isinstance((await read(stream))[1], Cancelled)

    run(body)


def test_drain_ends_what_an_engine_that_hangs_does_not_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CLOSE_TIMEOUT_S", 0.1)

    async def body() -> None:
        async with engine("echo-slow") as client:
            stream = client.submit(request("open", output=8_000))
            await anext(aiter(stream))
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            try:
                assert not await client.drain(0.1)
                _, outcome = await read(stream)
            finally:
                os.kill(client.pid, signal.SIGCONT)
            assert isinstance(outcome, Failed) and isinstance(outcome.error, Draining)
            await asyncio.sleep(0.2)  # what it says now of a request that is over is heard by nobody

    run(body)


def test_finished_by_its_reader_is_completed() -> None:
    """A stop string is found in text, above the engine: that is no cancellation."""

    async def body() -> None:
        async with engine("echo-slow") as client:
            stream = client.submit(request("stopped", output=8_000))
            await anext(aiter(stream))
            stream.finish()
            _, outcome = await read(stream)
            assert isinstance(outcome, Completed) and outcome.reason is FinishReason.STOP
            stream.finish()
            assert (await client.stats()).outcomes == {"completed": 1}

    run(body)


def test_a_listener_gets_what_was_there_and_what_comes() -> None:
    async def body() -> None:
        async with engine() as client:
            stream = client.submit(request("heard", output=40))
            first = await anext(aiter(stream))
            events: list[Event] = []
            await until(lambda: len(stream._events) > 1)
            stream.listen(events.append)
            await until(lambda: isinstance(events[-1], EndedEvent))
            assert len(events) == 40 and isinstance(first, TokensEvent)
            assert all(isinstance(event, TokensEvent) for event in events[:-1])

    run(body)


def test_close_ends_every_stream() -> None:
    async def body() -> None:
        async with engine("echo-slow") as client:
            stream = client.submit(request("open", output=8_000))
        _, outcome = await read(stream)
        assert isinstance(outcome, Failed) and isinstance(outcome.error, Draining)
        assert client.state is EngineState.CLOSED
        with pytest.raises(EngineDied):
            await client.stats()

    run(body)


def test_terminated_engine_finishes_what_is_open() -> None:
    async def body() -> None:
        async with engine("echo-slow") as client:
            stream = client.submit(request("open", output=6))
            await anext(stream)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGTERM)
            assert isinstance((await read(stream))[1], Completed)

    run(body)
