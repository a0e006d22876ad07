"""Workers over TCP: nothing without the secret, everything with it; a lost router leaves nothing open, a lost worker comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress

import pytest

from kvseal.core.errors import ConfigError, SetupError
from kvseal.core.events import TokensEvent
from kvseal.core.outcome import Completed
from kvseal.lab.rig import truth
from kvseal.node.channel import Channel, address_of, every_address
from kvseal.node.messages import Ping, ProtocolBroken, decode_to_engine, frame
from kvseal.node.remote import RemoteNode
from kvseal.node.router import Router
from kvseal.node.transfer_desk import FETCH_TIMEOUT_S, TransferDesk

from .fleets import HOST, SECRET, config, prompt, read, request, worker


def test_addresses() -> None:
    assert address_of("10.0.0.1:7000", "--listen") == ("10.0.0.1", 7000)
    assert address_of("[::1]:7000", "--listen") == ("::1", 7000)
    for wrong in ("", "host", "host:", ":7000", "host:port", "host:70000"):
        with pytest.raises(ConfigError):
            address_of(wrong, "--listen")


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "0.0", "0x0", "::", "::0", "0:0:0:0:0:0:0:0"])
def test_every_address_is_none_that_others_reach(host: str) -> None:
    assert every_address(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "10.0.0.1", "nowhere.invalid"])
def test_one_address_is_one(host: str) -> None:
    assert not every_address(host)


# --- the channel ---


def channels() -> tuple[Channel, Channel]:
    return Channel(b"k" * 32, dialer=True), Channel(b"k" * 32, dialer=False)


def test_what_was_closed_is_opened_in_order() -> None:
    ours, theirs = channels()
    for message in (Ping(), Ping()):
        assert decode_to_engine(theirs.opened(ours.closed(frame(message))[4:])) == message


@pytest.mark.parametrize("how", ["changed", "repeated", "left out", "reflected", "another key"])
def test_anything_else_is_no_frame(how: str) -> None:
    ours, theirs = channels()
    first, second = ours.closed(frame(Ping()))[4:], ours.closed(frame(Ping()))[4:]
    with pytest.raises(ProtocolBroken):
        match how:
            case "changed":
                theirs.opened(first[:-1] + bytes([first[-1] ^ 1]))
            case "repeated":
                theirs.opened(first)
                theirs.opened(first)
            case "left out":
                theirs.opened(second)
            case "reflected":
                ours.opened(first)
            case _:
                Channel(b"j" * 32, dialer=False).opened(first)


# --- links ---


def test_two_workers_and_a_router() -> None:
    right = truth(prompt(1, 90), 6)

    async def run() -> None:
        async with worker(config("prefill")) as (prefill, first), worker(config("decode")) as (decode, second):
            with pytest.raises(SetupError, match=r"not trusted|cannot be reached"):
                await RemoteNode.connect(HOST, first.port, secret=b"another secret of the tests")
            remotes = [await RemoteNode.connect(HOST, links.port, secret=SECRET) for links in (first, second)]
            router = Router(remotes, secret=SECRET)
            answer = await read(router.submit(request("a", prompt(1, 90))))
            assert isinstance(answer.outcome, Completed) and answer.tokens == right
            assert (await router.stats()).handoff["received"] >= 1
            await asyncio.sleep(0.1)
            assert all(remote.cached for remote in remotes)

            # An engine that dies is started again by its worker, and the router finds it again.
            os.kill(prefill.pid or 0, signal.SIGKILL)
            async with asyncio.timeout(60):
                while not all(router.fleet.usable(remote) and remote.restarts for remote in remotes[:1]):
                    await asyncio.sleep(0.05)
            answer = await read(router.submit(request("b", prompt(2, 90))))
            assert isinstance(answer.outcome, Completed) and answer.tokens == truth(prompt(2, 90), 6)

            # A router that goes leaves nothing behind.
            stream = router.submit(request("c", prompt(3, 90), 800))
            assert isinstance(await anext(stream), TokensEvent)
            await router.close()
            async with asyncio.timeout(60):
                while prefill.open_requests or decode.open_requests:
                    await asyncio.sleep(0.05)

    asyncio.run(run())


def test_a_router_waits_for_a_worker_that_starts_after_it() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port = taken.getsockname()[1]

    async def run() -> None:
        with pytest.raises(SetupError, match="cannot be reached"):
            await RemoteNode.connect(HOST, port, secret=SECRET)
        waiting = asyncio.create_task(RemoteNode.connect(HOST, port, secret=SECRET, patience_s=30))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        async with worker(config("decode"), port=port):
            remote = await waiting
            assert remote.role == "decode"
            await remote.close()

    asyncio.run(run())


def test_a_flood_of_strangers_keeps_no_router_out(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseal.node.link_server.MAX_STRANGERS", 8)

    async def run() -> None:
        async with worker(config("decode")) as (_, links):
            remote = await RemoteNode.connect(HOST, links.port, secret=SECRET)
            flood = [await asyncio.open_connection(HOST, links.port) for _ in range(40)]
            for at, (_, writer) in enumerate(flood):
                writer.write(b"GET / HTTP/1.1\r\n\r\n" * 30 if at % 2 else b"\0")
            other = await RemoteNode.connect(HOST, links.port, secret=SECRET)
            assert remote.usable and other.usable and len(links._strangers) <= 8
            for reader, writer in flood[:32]:
                with suppress(ConnectionError):
                    assert not await asyncio.wait_for(reader.read(1), 10), "nobody is told anything"
                writer.close()
            await remote.close()
            await other.close()

    asyncio.run(run())
    assert 0 < sum("turned away" in record.message for record in caplog.records) < 10


def test_a_front_arranges_the_hand_off() -> None:
    right = truth(prompt(4, 90), 6)

    async def run() -> None:
        async with worker(config("prefill")) as (prefill, first), worker(config("decode")) as (decode, second):
            desks = [TransferDesk(*pair, secret=SECRET, host=HOST, tls=None) for pair in ((prefill, first), (decode, second))]
            await read(prefill.submit(request("front-1", prompt(4, 90), 1)))
            offer = desks[0].offer({"do_remote_decode": True})
            assert offer is not None and desks[1].offer(None) is None
            source = desks[1].read({"kv_transfer_params": dict(offer)})
            assert source is not None
            answer = await read(desks[1].submit(request("front-2", prompt(4, 90)), source))
            assert isinstance(answer.outcome, Completed) and answer.tokens == right
            assert (await decode.stats()).handoff["received"] == 1

            # What the source does not hold (any more) is computed here.
            answer = await read(desks[1].submit(request("front-3", prompt(5, 90)), source))
            assert isinstance(answer.outcome, Completed) and answer.tokens == truth(prompt(5, 90), 6)
            assert (await decode.stats()).handoff["recomputed"] == 1
            for desk in desks:
                await desk.close()

    asyncio.run(run())


def test_a_source_that_freezes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvseal.node.transfer_desk.FROZEN_AFTER_S", 2.5)
    tokens = prompt(4, 90)

    async def run() -> None:
        async with worker(config("prefill")) as (prefill, first), worker(config("decode")) as (decode, second):
            desks = [TransferDesk(*pair, secret=SECRET, host=HOST, tls=None) for pair in ((prefill, first), (decode, second))]
            await read(prefill.submit(request("front-1", tokens, 1)))
            offer = desks[0].offer({"do_remote_decode": True})
            source = desks[1].read({"kv_transfer_params": dict(offer or {})})
            assert source is not None
            os.kill(prefill.pid or 0, signal.SIGSTOP)
            try:
                async with asyncio.timeout(FETCH_TIMEOUT_S / 2):
                    answer = await read(desks[1].submit(request("front-2", tokens), source))
            finally:
                os.kill(prefill.pid or 0, signal.SIGCONT)
            assert isinstance(answer.outcome, Completed) and answer.tokens == truth(tokens, 6)
            assert (await decode.stats()).handoff["recomputed"] == 1
            for desk in desks:
                await desk.close()

    asyncio.run(run())
