"""Every step of a hand-off x each side x dying and freezing x just before and just after: real processes, real signals.

A long job: ``pytest -m slow tests/unit/node/test_handoff_matrix.py``; the quick suite runs one case of each kind. Each case must end in the
one-node answer, or (when a token had been emitted by a node that is gone) in an honest error, within its deadline; and all pages of all
nodes must have come back.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from kvseal.core.errors import DeadlineExceeded, EngineDied
from kvseal.core.outcome import Completed, Failed
from kvseal.lab.rig import truth

from .fleets import Fleet, config, prompt, read, request

TOKENS = prompt(7, 100)
STEPS = {"prefill": ("intent", "pages", "manifest"), "decode": ("grant", "taken", "receipt")}
CASES = [
    (side, how, when, what) for side, steps in STEPS.items() for how in ("kill", "stop") for when in ("before", "after") for what in steps
]
QUICK = {("prefill", "kill", "after", "intent"), ("decode", "kill", "before", "receipt")}
DEADLINE_S = 15.0


@pytest.fixture(scope="module")
def right() -> list[int]:
    return truth(TOKENS, 6)


@pytest.mark.parametrize(
    "side, how, when, what", [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case)) for case in CASES]
)
def test_one_death(side: str, how: str, when: str, what: str, right: list[int], tmp_path: Path) -> None:
    doomed = tmp_path / f"oracle-{how}-{when}-{what}"
    roles = [("prefill", 0), ("decode", 0), *([("decode", 1)] if side == "decode" else [])]
    configs = [config(role, number, model=doomed if (role, number) == (side, 0) else "oracle", silence_s=1.5) for role, number in roles]
    fleet = Fleet(*configs, frozen_after_s=1.5)
    try:
        began_s = time.monotonic()
        answer = fleet.run(read(fleet.router.submit(request("mortal", TOKENS, deadline_s=DEADLINE_S))))
        assert doomed.with_name(doomed.name + ".died").exists(), "nobody has died"
        assert time.monotonic() - began_s < DEADLINE_S + 5.0
        if isinstance(answer.outcome, Completed):
            assert answer.tokens == right
        else:
            assert side == "decode" and isinstance(answer.outcome, Failed), answer
            assert isinstance(answer.outcome.error, EngineDied if how == "kill" else DeadlineExceeded), answer
            assert answer.tokens == right[: len(answer.tokens)] and answer.tokens
        for node in fleet.router.fleet.nodes:
            if node.pid is not None:
                os.kill(node.pid, signal.SIGCONT)
        fleet.run(fleet.until(lambda: all(fleet.router.fleet.usable(node) for node in fleet.router.fleet.nodes)))
        again = fleet.run(read(fleet.router.submit(request("again", TOKENS))))
        assert again.tokens == right
        fleet.run(fleet.settled())
    finally:
        fleet.close()
