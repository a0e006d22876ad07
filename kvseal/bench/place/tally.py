"""What becomes of the requests of a simulation, token by token, and whether it is worth going on.

Owns the records, the counting of misses, and `Stop`. A request misses once: with its first token if that is late, else at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvseal.bench.place.latency import WorkerKind
from kvseal.bench.place.slo import SLO, Record
from kvseal.bench.place.trace import Job


class Stop(Exception):
    """More requests have missed their limits than were allowed to."""


class Tally:
    def __init__(self, jobs: Sequence[Job], slo: SLO | None, missed_allowed: int | None) -> None:
        self.records = [Record(job.at_s, job.output_tokens, job.prompt_tokens) for job in jobs]
        self._slo = slo
        self._left = missed_allowed
        self._gaps = slo is None or slo.tbt_s is not None

    def refuses(self, index: int, kinds: Sequence[WorkerKind]) -> bool:
        """Whether it fits none or not all of the workers that it would use (L1); counted as missed."""
        record = self.records[index]
        total = record.prompt_tokens + record.output_tokens
        if kinds and all(total <= min(kind.context_tokens, kind.pool_tokens // kind.stages) for kind in kinds):
            return False
        self.refused(index)
        return True

    def refused(self, index: int) -> None:
        self.records[index].refused = True
        self._missed()

    def token(self, index: int, now_s: float) -> None:
        self.tokens(index, now_s, 1)

    def tokens(self, index: int, now_s: float, count: int) -> None:
        """The next `count` tokens, evenly since the last one."""
        record = self.records[index]
        if not record.produced:
            record.first_s = record.last_s = now_s
            record.produced = count
            if self._slo is not None and not self._slo.first_in_time(record):
                self._missed()
            return
        if self._gaps:
            record.gaps.append(((now_s - record.last_s) / count, count))
        record.produced += count
        record.last_s = now_s

    def ended(self, index: int) -> None:
        """All its tokens have come."""
        record = self.records[index]
        if self._slo is not None and self._slo.first_in_time(record) and not self._slo.met(record):
            self._missed()

    def _missed(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Stop
