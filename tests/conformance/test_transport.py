"""One suite for every transport: content, bounds, death, frost, restarts, fences. Each row of the failure table of `docs/handoff.md`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.transports import KINDS_OF_TRANSPORT, SECRET, Receiver, receiver, server, wait_for

from kvseal.core.errors import ConfigError
from kvseal.handoff.make import make_transport
from kvseal.handoff.transport import Landed, Lost, Source
from kvseal.kv.seal import SealCheck
from kvseal.lab.page_server import PageServer

PAGES = 400
"""Of about 12 KiB: 5 MB, several batches of every transport."""
BIG_LAYERS, BIG_PAGES = 30, 100
"""37 MB: long enough to be in the middle of."""


@pytest.fixture(params=KINDS_OF_TRANSPORT, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def far(kind: str) -> Iterator[PageServer]:
    """For tests that leave it as it was."""
    with server(kind, PAGES) as made:
        yield made


@pytest.fixture(scope="module")
def big(kind: str) -> Iterator[PageServer]:
    """The same, for tests that are in the middle of something."""
    with server(kind, BIG_PAGES, BIG_LAYERS, incarnation="sender-00000003") as made:
        yield made


@pytest.fixture
def near(kind: str) -> Iterator[Receiver]:
    with receiver(kind, PAGES, 1) as made:
        yield made


def scattered(pages: int) -> list[int]:
    return [(page * 7) % pages for page in range(pages)]


def test_pages_come_in_order_each_once_with_the_right_content(near: Receiver, far: PageServer) -> None:
    moves = far.moves(scattered(PAGES))
    near.receive("T", far, moves[:10])
    near.receive("T", far, moves[10:])
    near.wait_landed("T", PAGES)
    assert near.right(moves)
    next_ordinal = 0
    for report in near.reports:
        assert isinstance(report, Landed) and report.first_ordinal == next_ordinal
        assert report.bytes == report.pages * near.geometry.page_bytes
        next_ordinal += report.pages
    assert next_ordinal == PAGES
    assert near.transport.fence("T") and near.transport.fence("T") and near.transport.fence("unknown")
    assert near.transport.withdraw("unknown")


def test_only_what_was_asked_for_is_written(near: Receiver, far: PageServer) -> None:
    moves = far.moves([5, 3, 100], first=17)
    near.receive("T", far, moves)
    near.wait_landed("T", 3)
    assert near.right(moves) and near.untouched([page for page in range(PAGES) if page not in (5, 3, 100)])


def test_a_landed_page_still_bears_its_senders_nonce(near: Receiver, far: PageServer) -> None:
    (move,) = far.moves([5], first=17)
    near.receive("T", far, [move])
    near.wait_landed("T", 1)
    assert int.from_bytes(near.arena.memory[5, 8:16].tobytes(), "little") == move.source_nonce


@pytest.mark.parametrize("bad", [PAGES, 2**31 - 1])
def test_one_page_out_of_bounds_refuses_the_whole_batch_before_a_byte(near: Receiver, far: PageServer, bad: int) -> None:
    moves = far.moves(list(range(10)))
    moves[5] = moves[5]._replace(source_page=bad)
    near.receive("T", far, moves)
    near.wait_lost("T")
    near.fence("T")
    assert near.untouched(list(range(PAGES)))


@pytest.mark.parametrize(
    ("changed", "check"),
    [
        ({"source_nonce": 5}, SealCheck.NONCE),
        ({"ordinal": 9}, SealCheck.ORDINAL),
        ({"fold": bytes(16)}, SealCheck.FOLD),
    ],
    ids=["nonce", "ordinal", "fold"],
)
def test_a_page_that_is_not_what_was_announced_fails_the_transfer(
    near: Receiver, far: PageServer, changed: dict[str, int], check: SealCheck
) -> None:
    moves = far.moves(list(range(10)))
    moves[4] = moves[4]._replace(**changed)  # type: ignore[arg-type]
    near.receive("T", far, moves)
    lost = near.wait_lost("T")
    refused_by_sender = "nonce" in str(check.name).lower() and lost.fault is None
    assert refused_by_sender or (lost.fault is not None and lost.fault.check is check)


def test_a_page_reused_by_its_sender_meanwhile_is_refused(kind: str) -> None:
    with server(kind, 20) as far, receiver(kind, 40, 1) as near:
        far.tell("reuse 4")
        near.receive("T", far, far.moves(list(range(10))))
        lost = near.wait_lost("T")
        assert lost.fault is None or lost.fault.check is SealCheck.NONCE
        near.receive("U", far, far.moves([20], first=4))
        near.wait_lost("U")


def test_another_secret_gets_nothing(kind: str, far: PageServer) -> None:
    if kind == "nixl":
        pytest.skip("NIXL proves nobody: on loopback alone, or over RDMA with a key that an authenticated link has brought")
    with receiver(kind, 4, 1, secret=b"another secret, as long") as near:
        near.receive("T", far, far.moves([0, 1, 2, 3]))
        assert "NotTrusted" in near.wait_lost("T").detail
        assert near.untouched([0, 1, 2, 3])


def test_another_incarnation_is_refused(near: Receiver, far: PageServer) -> None:
    source = Source("sender-00000002", far.source.endpoint)
    near.transport.receive("T", source, far.moves([0, 1]), near.landing)
    near.wait_lost("T")
    assert near.untouched([0, 1])


@pytest.mark.parametrize("endpoint", [b"", b"nowhere", b"\xff\xff", b"0 127.0.0.1", b"99999 127.0.0.1", b"1 127.0.0.1"])
def test_an_endpoint_that_is_none_is_a_lost_transfer(near: Receiver, far: PageServer, endpoint: bytes) -> None:
    near.transport.receive("T", Source(far.source.incarnation, endpoint), far.moves([0]), near.landing)
    near.wait_lost("T")
    assert near.untouched([0]) and near.transport.fence("T")


def test_a_transfer_that_is_lost_reports_nothing_more_and_the_next_one_works(near: Receiver, far: PageServer) -> None:
    bad = [far.moves([0])[0]._replace(source_nonce=1)]
    near.receive("T", far, bad)
    near.wait_lost("T")
    before = len(near.poll())
    far.tell("offer U receiver-0001")
    good = far.moves(list(range(10)))
    near.receive("U", far, good)
    near.wait_landed("U", 10)
    assert near.right(good)
    assert not [report for report in near.reports[before:] if report.transfer == "T"]


def test_after_the_fence_nothing_is_written_and_nothing_is_reported(kind: str, big: PageServer) -> None:
    with receiver(kind, BIG_PAGES, BIG_LAYERS) as near:
        for transfer in ("T", "U", "V"):
            big.tell(f"offer {transfer} receiver-0001")
            near.receive(transfer, big, big.moves(list(range(BIG_PAGES))))
            assert wait_for(lambda transfer=transfer: near.landed(transfer) > 0)
            near.fence(transfer)
            near.mark(list(range(BIG_PAGES)))
            known = len(near.poll())
            time.sleep(0.1)
            assert near.untouched(list(range(BIG_PAGES))), "a late write"
            assert not [report for report in near.poll()[known:] if report.transfer == transfer]


def test_a_killed_sender_is_a_lost_transfer_and_a_new_one_works(kind: str) -> None:
    with server(kind, BIG_PAGES, BIG_LAYERS) as far, receiver(kind, BIG_PAGES, BIG_LAYERS) as near:
        near.receive("T", far, far.moves(list(range(BIG_PAGES))))
        assert wait_for(lambda: near.landed("T") > 0)
        far.process.kill()
        near.receive("T", far, far.moves(list(range(BIG_PAGES))))
        assert isinstance(near.wait_lost("T"), Lost)
        near.fence("T")
        near.mark(list(range(BIG_PAGES)))
        with server(kind, 10, BIG_LAYERS, incarnation="sender-00000002") as again:
            moves = again.moves(list(range(10)))
            near.receive("T", again, moves)
            assert wait_for(lambda: any(isinstance(r, Landed) and r.transfer == "T" and near.right(moves) for r in near.poll()))
        assert near.untouched(list(range(10, BIG_PAGES)))


def test_a_frozen_sender_is_silence_until_the_fence_and_wakes_to_nothing(kind: str, big: PageServer) -> None:
    with receiver(kind, BIG_PAGES, BIG_LAYERS) as near:
        near.receive("T", big, big.moves([0]))
        near.wait_landed("T", 1)
        os.kill(big.process.pid, signal.SIGSTOP)
        try:
            near.receive("T", big, [move._replace() for move in big.moves(list(range(1, BIG_PAGES)), first=1)])
            wait_for(lambda: near.landed("T") == BIG_PAGES, 0.5)
            assert near.lost("T") is None, "a frozen peer is silence, not an error (a mapped arena needs it for nothing)"
            near.fence("T")
            near.mark(list(range(BIG_PAGES)))
        finally:
            os.kill(big.process.pid, signal.SIGCONT)
        time.sleep(0.3)
        assert near.untouched(list(range(BIG_PAGES))), "it woke, and wrote"


def test_a_frozen_sender_holds_up_nobody_else(kind: str, near: Receiver, far: PageServer) -> None:
    far.tell("offer U receiver-0001")
    with server(kind, 4, incarnation="sender-00000002") as frozen:
        os.kill(frozen.process.pid, signal.SIGSTOP)
        try:
            near.receive("T", frozen, frozen.moves([PAGES - 1]))
            moves = far.moves(list(range(PAGES - 1)))
            near.receive("U", far, moves)
            near.wait_landed("U", PAGES - 1)
            assert near.right(moves)
        finally:
            os.kill(frozen.process.pid, signal.SIGCONT)


def test_a_reset_loses_what_is_open_and_leaves_a_working_transport(kind: str, big: PageServer) -> None:
    with receiver(kind, BIG_PAGES, BIG_LAYERS) as near:
        near.receive("T", big, big.moves(list(range(BIG_PAGES))))
        assert wait_for(lambda: near.landed("T") > 0)
        assert near.transport.reset()
        assert near.landed("T") == BIG_PAGES or near.lost("T") is not None
        near.mark(list(range(BIG_PAGES)))
        time.sleep(0.1)
        assert near.untouched(list(range(BIG_PAGES)))
        big.tell("offer U receiver-0001")
        moves = big.moves(list(range(10)))
        near.receive("U", big, moves)
        near.wait_landed("U", 10)
        assert near.right(moves)


def test_after_close_nothing_is_written(kind: str, big: PageServer) -> None:
    with receiver(kind, BIG_PAGES, BIG_LAYERS) as near:
        near.receive("T", big, big.moves(list(range(BIG_PAGES))))
        assert wait_for(lambda: near.landed("T") > 0)
        near.transport.close()
        near.mark(list(range(BIG_PAGES)))
        time.sleep(0.1)
        assert near.untouched(list(range(BIG_PAGES)))


def test_one_very_large_call(near: Receiver, far: PageServer) -> None:
    """More pages than any batch: the failure table's engines lost some of them."""
    moves = far.moves(scattered(PAGES)) * 6
    near.receive("T", far, moves)
    near.wait_landed("T", len(moves))
    assert near.right(moves[:PAGES]) and near.transport.fence("T")


def test_many_transfers_side_by_side(near: Receiver, far: PageServer) -> None:
    moves = far.moves(list(range(PAGES)))
    for number in range(40):
        far.tell(f"offer T{number} receiver-0001")
        near.receive(f"T{number}", far, moves[10 * number : 10 * number + 10])
    for number in range(40):
        near.wait_landed(f"T{number}", 10)
        assert near.transport.fence(f"T{number}")
    assert near.right(moves[:400])


def listening() -> set[str]:
    """Local addresses at which this process waits for connections, as the system writes them, without ports."""
    links = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]]
    return {fields[1].partition(":")[0] for fields in lines if fields[3] == "0A" and fields[9] in sockets}


def test_what_is_told_to_stay_on_this_machine_listens_nowhere_else(kind: str) -> None:
    before = listening()
    with receiver(kind, 4, 1):
        assert listening() - before <= {"0100007F"}, "127.0.0.1"


def test_what_cannot_be_is_refused_by_name() -> None:
    with receiver("tcp", 4, 1) as near:
        memory = near.arena.memory
        with pytest.raises(ConfigError, match="shared arena"):
            make_transport("shm", memory, file=-1, incarnation="receiver-0001", secret=SECRET)
        with pytest.raises(ConfigError, match="at least 16"):
            make_transport("tcp", memory, file=-1, incarnation="receiver-0001", secret=b"short")
        with pytest.raises(ConfigError, match="choose from"):
            make_transport("pigeon", memory, file=-1, incarnation="receiver-0001", secret=SECRET)
        with pytest.raises(ConfigError, match="cannot listen"):
            make_transport("tcp", memory, file=-1, incarnation="receiver-0001", secret=SECRET, host="192.0.2.1")
