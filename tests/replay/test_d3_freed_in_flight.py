"""D3 (vllm#45357, vllm-ascend#14055): a finished or preempted request's blocks are freed while a later step still runs on them."""

from __future__ import annotations

from kvseal.core.ids import RequestId
from kvseal.kv.handles import Ticket
from kvseal.kv.manager import Grant, KVManager
from kvseal.lab.oracle import OracleBackend
from kvseal.lab.rig import Rig, truth

from .rigging import Unchecked, prompt

OURS = prompt(2, 10)


class NoTickets(KVManager):
    """Frees at once, whatever is in flight."""

    def ticket(self, grant: Grant) -> Ticket:
        return Ticket(self.pool)


def late_step(backend: type[OracleBackend], manager: type[KVManager]) -> Rig:
    """A's step is in flight when A leaves; B gets pages and is computed; then A's step writes."""
    rig = Rig(pages=8, backend_class=backend, manager_class=manager)
    rig.submit("A", prompt(1, 25), 5)
    in_flight = rig.scheduler.schedule()
    rig.cancel("A")
    other = Rig(pages=8, over=rig)
    answer = other.submit("B", OURS, 6)
    other.step()
    late = rig.runner.run(in_flight, rig.kv.ledger_nonces)
    rig.answers["late"] = late.rows[0]  # type: ignore[assignment]
    rig.scheduler.apply(late)
    while other.engine.has_work:
        other.step()
    rig.answers["B"] = answer
    return rig


def test_with_tickets_the_pages_are_not_handed_out() -> None:
    rig = Rig(pages=8)
    rig.submit("A", prompt(1, 25), 5)
    in_flight = rig.scheduler.schedule()
    rig.cancel("A")
    assert rig.kv.usage().draining == 7 and rig.kv.available_pages == 1
    assert rig.kv.admit(RequestId("B"), in_flight.rows[0].table.scope, OURS, first_tokens=10) is None
    rig.scheduler.apply(rig.runner.run(in_flight, rig.kv.ledger_nonces))
    assert rig.kv.available_pages == 8
    rig.engine.check()


def test_without_tickets_the_late_write_is_refused() -> None:
    rig = late_step(OracleBackend, NoTickets)
    assert rig.answers["late"].broken.check == "ledger"  # type: ignore[attr-defined]
    assert rig.answers["B"].tokens == truth(OURS, 6)
    assert rig.engine.stats().broken_seals == {"L3": 1}


def test_without_tickets_and_seals_b_would_have_answered_from_a() -> None:
    assert late_step(Unchecked, NoTickets).answers["B"].tokens != truth(OURS, 6)
