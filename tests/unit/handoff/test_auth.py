"""The handshake: both hold the secret, both are who was wanted, and nothing said once is worth anything a second time."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from kvseal.core.errors import ConfigError
from kvseal.handoff.auth import Dialer, Listener, NotTrusted, checked_secret

SECRET = b"a secret of two nodes"


def dialer(secret: bytes = SECRET, purpose: str = "pages", wanted: str = "listener-01") -> Dialer:
    return Dialer(secret, purpose, "dialer-0001", wanted)


def listener(secret: bytes = SECRET) -> Listener:
    return Listener(secret, "pages", "listener-01")


def test_both_prove_themselves() -> None:
    here, there = dialer(), listener()
    assert there.accept(here.proof(there.answer(here.greeting()))) == "dialer-0001"


def test_another_secret_proves_nothing_either_way() -> None:
    here, there = dialer(b"another secret, as long"), listener()
    answer = there.answer(here.greeting())
    with pytest.raises(NotTrusted, match="same secret"):
        here.proof(answer)
    with pytest.raises(NotTrusted, match="same secret"):
        there.accept(bytes(32))


@pytest.mark.parametrize("purpose", ["arena", "x" * 17])
def test_a_greeting_for_something_else_is_refused(purpose: str) -> None:
    with pytest.raises(NotTrusted):
        listener().answer(dialer(purpose=purpose).greeting())


def test_a_greeting_for_another_incarnation_is_refused_at_both_ends() -> None:
    with pytest.raises(NotTrusted, match="incarnation"):
        listener().answer(dialer(wanted="listener-02").greeting())
    here = dialer(wanted="listener-02")
    greeting = here.greeting()
    impostor = Listener(SECRET, "pages", "listener-01")
    patched = greeting[:-64] + b"listener-01".ljust(64, b"\0")
    with pytest.raises(NotTrusted):
        here.proof(impostor.answer(patched))


def test_a_listener_of_another_name_is_refused_even_if_it_holds_the_secret() -> None:
    here = dialer()
    greeting = here.greeting()
    said = greeting + bytes(32) + b"listener-02".ljust(64, b"\0")
    mac = hmac.new(SECRET, b"listener|" + said, hashlib.sha256).digest()
    with pytest.raises(NotTrusted, match="incarnation differs"):
        here.proof(said[len(greeting) :] + mac)


def test_nothing_can_be_replayed_reflected_or_altered() -> None:
    here, there = dialer(), listener()
    greeting = here.greeting()
    answer = there.answer(greeting)
    proof = here.proof(answer)
    again = listener()
    again.answer(greeting)
    with pytest.raises(NotTrusted):
        again.accept(proof)
    with pytest.raises(NotTrusted):
        there.accept(answer[-32:])
    for at in (0, 40, len(answer) - 1):
        broken = bytearray(answer)
        broken[at] ^= 1
        with pytest.raises(NotTrusted):
            here.proof(bytes(broken))
    for size in (0, len(answer) - 1, len(answer) + 1):
        with pytest.raises(NotTrusted, match="size"):
            here.proof(bytes(size))


def test_order_matters() -> None:
    with pytest.raises(NotTrusted):
        dialer().proof(bytes(128))
    with pytest.raises(NotTrusted):
        listener().accept(bytes(32))
    with pytest.raises(NotTrusted):
        listener().answer(b"GET / HTTP/1.1\r\n\r\n")


def test_a_short_secret_is_none() -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        checked_secret(b"short")
