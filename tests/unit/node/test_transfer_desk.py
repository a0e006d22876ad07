"""What a front may say: only what a worker with the same secret has said before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvseal.core.errors import Forbidden, InvalidRequest
from kvseal.node.transfer_desk import FIELD, Source, TransferDesk

SECRET = b"a secret of the tests"


def desk(secret: bytes = SECRET) -> TransferDesk:
    node = SimpleNamespace(card=SimpleNamespace(incarnation="incarnation-1"))
    links = SimpleNamespace(port=7000)
    return TransferDesk(node, links, secret=secret, host="10.0.0.1", tls=None)  # type: ignore[arg-type]


def offered() -> dict[str, Any]:
    offer = desk().offer({"do_remote_decode": True, "do_remote_prefill": False})
    assert offer is not None
    return dict(offer)


def test_an_offer_is_read_again() -> None:
    fields = {FIELD: offered(), "model": "m"}
    assert desk().read(fields) == Source("10.0.0.1", 7000, "incarnation-1")
    assert fields == {"model": "m"}


def test_nothing_asked_nothing_offered() -> None:
    assert desk().read({}) is None and desk().read({FIELD: None}) is None and desk().read({FIELD: {"do_remote_decode": True}}) is None
    assert desk().offer(None) is None and desk().offer({"do_remote_decode": False}) is None


@pytest.mark.parametrize(
    "name, value", [("remote_host", "10.0.0.9"), ("remote_port", 22), ("remote_engine_id", "x"), ("kvseal_proof", "00")]
)
def test_a_made_up_place_is_forbidden(name: str, value: object) -> None:
    with pytest.raises(Forbidden):
        desk().read({FIELD: offered() | {name: value}})
    with pytest.raises(Forbidden):
        desk(b"another secret of the tests").read({FIELD: offered()})


@pytest.mark.parametrize("value", [3, "x", [], {"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_host": 1}])
def test_what_is_malformed_is_named(value: object) -> None:
    with pytest.raises(InvalidRequest, match=FIELD):
        desk().read({FIELD: value})
