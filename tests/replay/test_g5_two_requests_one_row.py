"""G5 (sglang#22716): two requests share one row of transfer metadata.  K8 (vllm#49796): a client chooses the id of a transfer."""

from __future__ import annotations

import pytest

from kvseal.core.errors import KVTransferFailed
from kvseal.core.ids import RequestId
from kvseal.core.outcome import Completed, Failed
from kvseal.core.request import Request
from kvseal.lab.pair import Pair
from kvseal.lab.rig import GREEDY, SCOPE
from kvseal.node import peer_messages as p

from .handing import OURS, OUTPUT_TOKENS, right_answer
from .rigging import prompt

OTHER = prompt(9, 61)


def second_with_the_same_id(on_failure: str, *, after: bool) -> tuple[Pair, list[object], list[int]]:
    pair = Pair(on_failure=on_failure)
    heard = pair.submit("request-1", OURS, OUTPUT_TOKENS)
    if after:
        pair.run()
    outcomes: list[object] = []
    tokens: list[int] = []

    def hear(node: object, event: object) -> None:
        if node is pair.decode:
            tokens.extend(event.tokens) if isinstance(event, tuple) else outcomes.append(event.outcome)  # type: ignore[attr-defined]

    pair.on_event = hear
    request = Request(
        request_id=RequestId("request-2"), prompt_tokens=tuple(OTHER), max_output_tokens=OUTPUT_TOKENS, scope=SCOPE, sampling=GREEDY
    )
    pair.decode.take(p.Receive(request, "handoff-request-1", pair.prefill.incarnation, 60.0))
    pair.prefill.take(p.Prefill(request, "handoff-request-1", pair.decode.incarnation, 60.0))
    pair.run()
    assert isinstance(heard.outcome, Completed) and heard.tokens == right_answer()
    pair.settled()
    return pair, outcomes, tokens


@pytest.mark.parametrize("after", [False, True])
def test_the_second_owner_gets_its_own_answer(after: bool) -> None:
    _, outcomes, tokens = second_with_the_same_id("recompute", after=after)
    assert len(outcomes) == 1 and isinstance(outcomes[0], Completed) and tokens == right_answer(OTHER)


@pytest.mark.parametrize("after", [False, True])
def test_or_an_honest_error(after: bool) -> None:
    _, outcomes, tokens = second_with_the_same_id("fail", after=after)
    assert len(outcomes) == 1 and isinstance(outcomes[0], Failed) and isinstance(outcomes[0].error, KVTransferFailed) and not tokens
