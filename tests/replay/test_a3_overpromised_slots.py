"""A3 (lemonade#3276, llama.cpp#23652): every slot is promised the whole context, one buffer stands behind all; N long prompts at once
end in 500 or a hang. Here the promise is judged against the sum: who does not fit now waits, who never fits is refused."""

from __future__ import annotations

import pytest

from kvseal.core.errors import LawBroken, PoolTooSmall
from kvseal.core.outcome import Completed
from kvseal.kv.capacity import Capacity
from kvseal.kv.manager import KVManager
from kvseal.lab.rig import Rig, truth

from .rigging import prompt


def test_long_prompts_at_once_all_complete() -> None:
    rig = Rig(pages=20, max_running=8)
    answers = [rig.submit(str(i), prompt(i, 60), 12) for i in range(8)]
    rig.run()
    for i, answer in enumerate(answers):
        assert isinstance(answer.outcome, Completed)
        assert answer.tokens == truth(prompt(i, 60), 12)


def test_what_is_advertised_is_what_the_pool_holds() -> None:
    lowered = Capacity.derive(model_context_tokens=8_192, pool_pages=20, page_tokens=16)
    assert lowered.served_context_tokens == 320 and lowered.full_length_requests == 1
    with pytest.raises(PoolTooSmall, match="8192"):
        Capacity.derive(model_context_tokens=8_192, pool_pages=20, page_tokens=16, fixed_context_tokens=8_192)


class OverPromising(KVManager):
    """Counts the whole pool as available to each."""

    @property
    def available_pages(self) -> int:
        return self.pool.pages


def test_overpromising_is_caught_where_pages_are_taken() -> None:
    rig = Rig(pages=20, manager_class=OverPromising)
    for i in range(2):
        rig.submit(str(i), prompt(i, 60), 1)
    with pytest.raises(LawBroken, match="L2"):
        rig.run(checked=False)
