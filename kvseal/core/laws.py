"""The laws of KVSeal, by number.

Owns the one list that code, tests, metrics and error texts quote. Never decides anything itself.
The full wording, with reasons, stands in ``docs/laws.md``.
"""

from __future__ import annotations

from enum import StrEnum


class Law(StrEnum):
    """A law's number. ``Law.L3.statement`` is the sentence that error texts quote."""

    L1 = "L1"
    L2 = "L2"
    L3 = "L3"
    L4 = "L4"
    L4K = "L4k"
    L5 = "L5"
    L6 = "L6"
    L7 = "L7"
    L8 = "L8"
    L9 = "L9"
    L10 = "L10"
    L11 = "L11"
    L12 = "L12"
    L13 = "L13"

    @property
    def statement(self) -> str:
        return _STATEMENTS[self]


_STATEMENTS: dict[Law, str] = {
    Law.L1: "admission is closed: prompt and output budget fit in every pool before anything is reserved",
    Law.L2: "conservation: free + leased + sealed + draining + quarantined = total, released exactly once",
    Law.L3: "no access without a stamp: the stamp's nonce equals the seal in the page's memory",
    Law.L4: "scope: a page is read only by requests of the scope that sealed it",
    Law.L4K: "complete keys: prefixes are found by keyed, chained, complete digests and compared token by token",
    Law.L5: "written before read: no slot at or past `filled` is read",
    Law.L6: "place: page i of a block table has ordinal i; a logits row carries its request's id",
    Law.L7: "seal before share: a page is shared only when full, committed and digested, and never written again",
    Law.L8: "quiescence before reuse: a page with something in flight is never free",
    Law.L9: "transfers fail closed: failure is the initial state",
    Law.L10: "trim means gone, and formats match",
    Law.L11: "one terminal state: an ended request is absorbing",
    Law.L12: "contained and visible: a violation fails that request alone, is quarantined and counted",
    Law.L13: "exact: the same request gives the same tokens, to the bit",
}
