"""Links and pages inside TLS: both ends show a certificate that the same authority has signed, or nothing is said."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvseal.core.config import EngineConfig, TLSFiles
from kvseal.core.errors import ConfigError, SetupError
from kvseal.core.outcome import Completed
from kvseal.lab.rig import truth
from kvseal.node import remote as remote_module
from kvseal.node.channel import client_context, server_context
from kvseal.node.link_server import LinkServer
from kvseal.node.remote import RemoteNode
from kvseal.node.router import Router

from .certificates import IMPOSTOR, OTHERS, OURS
from .fleets import HOST, SECRET, config, prompt, read, request, worker

OTHER_SECRET = b"another secret of the tests"


def far_config(role: str) -> EngineConfig:
    """Pages over TCP, inside TLS."""
    made = config(role)
    assert made.node is not None
    return replace(made, node=replace(made.node, listen=HOST, tls=OURS))


def test_two_workers_and_a_router_with_everything_inside_tls() -> None:
    right = truth(prompt(1, 91), 6)

    async def run() -> None:
        async with worker(far_config("prefill"), OURS) as (_, first), worker(far_config("decode"), OURS) as (_, second):
            remotes = [await RemoteNode.connect(HOST, links.port, secret=SECRET, tls=OURS) for links in (first, second)]
            router = Router(remotes, secret=SECRET)
            answer = await read(router.submit(request("a", prompt(1, 91))))
            assert isinstance(answer.outcome, Completed) and answer.tokens == right
            counts = (await router.stats()).handoff
            assert counts["received"] == 1 and counts["pages"] == 12 and counts["recomputed"] == 0
            assert [remote.card.transport for remote in remotes if remote.card] == ["tcp", "tcp"]
            await router.close()

    asyncio.run(run())


async def _plain(port: int) -> None:
    """Somebody who speaks TCP and no TLS gets not a byte."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    found = b""
    with suppress(ConnectionError):
        found = await asyncio.wait_for(reader.read(1), 10)
    assert found in (b"", b"\x15"), "at most an alert of TLS itself"
    writer.close()


async def _without_certificate(port: int) -> None:
    """The server's certificate is checked and good, and this end shows none."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(OURS.authority))
    with pytest.raises((OSError, asyncio.IncompleteReadError)):
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
        try:
            writer.write(bytes(300))
            await asyncio.wait_for(reader.readexactly(1), 10)
        finally:
            writer.close()


def test_nobody_else_is_let_in_or_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pairing that must not be, against one worker; and then the right one."""

    async def refused(links: LinkServer, host: str, secret: bytes, tls: TLSFiles | None, why: str) -> None:
        with pytest.raises(SetupError, match=why):
            await RemoteNode.connect(host, links.port, secret=secret, tls=tls)

    async def run() -> None:
        async with worker(far_config("decode"), OURS) as (node, links):
            await refused(links, HOST, SECRET, OTHERS, "certificate verify failed")  # it trusts another authority
            await refused(links, HOST, SECRET, IMPOSTOR, "cannot be reached")  # it shows another authority's certificate
            await refused(links, "localhost", SECRET, OURS, "certificate verify failed")  # the certificate is for another name
            await refused(links, HOST, SECRET, None, "cannot be reached.*TLS at both ends or at neither")  # it speaks no TLS
            await refused(links, HOST, OTHER_SECRET, OURS, "not trusted")  # the certificate is not enough
            await _plain(links.port)
            await _without_certificate(links.port)
            assert not links._routers and node.card is not None
            remote = await RemoteNode.connect(HOST, links.port, secret=SECRET, tls=OURS)
            assert remote.card == node.card
            await remote.close()
            plain = LinkServer(node, SECRET, None)
            await plain.listen(HOST, 0)
            await refused(plain, HOST, SECRET, OURS, "cannot be reached.*TLS at both ends or at neither")  # the worker speaks no TLS
            monkeypatch.setattr(remote_module, "HANGS_UP_S", 1.0)
            with pytest.raises(SetupError, match="at neither"):
                async with asyncio.timeout(30):
                    await RemoteNode.connect(HOST, plain.port, secret=SECRET, tls=OURS, patience_s=300)
            await plain.close()

    asyncio.run(run())


@pytest.mark.parametrize("make", [server_context, client_context])
@pytest.mark.parametrize("field", ["certificate", "key", "authority"])
def test_files_that_are_none_are_an_error_at_start(make: object, field: str, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    for path in (nothing, tmp_path / "missing.pem"):
        with pytest.raises(ConfigError, match="TLS files"):
            make(replace(OURS, **{field: path}))  # type: ignore[operator]
    with pytest.raises(ConfigError, match="TLS files"):
        make(replace(OURS, key=OTHERS.key))  # type: ignore[operator]
