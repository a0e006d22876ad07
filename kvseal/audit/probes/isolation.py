"""Prefix cache isolation: can one tenant sense what another one asked?

Two instruments. Cached-token counts in usage are certain. Time to first token needs statistics, of pairs measured at one moment (a busy
machine is slow by phases), and as many as the server's noise asks for: the owner's own warm and cold times are the positive control, and
the test says with which power it could have seen the same effect for a stranger. Sharing across tenants is "not isolated", a finding of its
own: text does not leak by it, but what others asked can be guessed and confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvseal.audit.findings import Confidence, Finding, Grade, ProbeResult, Series
from kvseal.audit.probes.base import Cost, Depth, Probe, Scene, exhibit
from kvseal.audit.statistics import ALPHA, WANTED_POWER, median, paired_test, power
from kvseal.audit.target import Target
from kvseal.audit.wire import Answer, Ask

_PREFIX_TOKENS = 512
_LOOKS = 6
_ALPHA_A_LOOK = ALPHA / _LOOKS  # So that looking more than once does not raise false alarms (Bonferroni).
_ENOUGH_POWER = 0.99  # What one look must have before nothing seen ends the test early.
_LEAST_PAIRS = 13  # With fewer not even a clean sweep reaches the level of one look: 2^-13 < ALPHA / 6 < 2^-12.
_HINT = 0.05  # A test that came so near to its level has not shown that there is nothing.
_LEAST_RATIO = 1.1  # A cache that is not worth a tenth of the time is not what a stranger senses.
_REMEDY = "Key the prefix cache by tenant; let a caller narrow its cache, never widen it."
_SOURCES = ("https://github.com/vllm-project/vllm/issues/16016", "https://github.com/vllm-project/vllm/pull/53347")


def cost(target: Target, depth: Depth, concurrency: int) -> Cost:
    requests = 2 * 4 * _pairs(depth)
    return Cost(requests, requests * (_prefix_tokens(target) + 2))


def _pairs(depth: Depth) -> int:
    """Most pairs of one comparison: `_LOOKS` looks, after each of which it may be decided."""
    return _LOOKS * {Depth.QUICK: 8, Depth.NORMAL: _LEAST_PAIRS, Depth.THOROUGH: 24}[depth]


def _prefix_tokens(target: Target) -> int:
    return max(48, min(_PREFIX_TOKENS, min((*target.limits(), 1 << 30)) // 2))


@dataclass(slots=True)
class _Times:
    """Seconds to the first token, and cached-token counts, of one kind of request."""

    seconds: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def take(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.seconds.append(answer.first_s if answer.first_s is not None else answer.total_s)
        if answer.cached_tokens is not None:
            self.cached.append(answer.cached_tokens)


async def run(scene: Scene, result: ProbeResult) -> None:
    if scene.tenants > 1:
        await _between(scene, result, "two keys", "isolation.shared-across-keys", stranger_tenant=1, salts=False)
    else:
        result.unproven.append(
            "only one key was given, so isolation between tenants could not be tested: give two of different tenants with --keys"
        )
    await _between(scene, result, "two salts of one key", "isolation.salt-ignored", stranger_tenant=0, salts=True)


async def _between(scene: Scene, result: ProbeResult, who: str, rule: str, *, stranger_tenant: int, salts: bool) -> None:
    """Owner cold; then, shuffled: owner warm, stranger on the owner's prefix, stranger on a fresh prefix. Many times."""
    cold, warm, stranger, fresh = _Times(), _Times(), _Times(), _Times()
    tokens, chat = _prefix_tokens(scene.target), scene.target.plain
    for number in range(_pairs(scene.depth)):
        if number and number % (_pairs(scene.depth) // _LOOKS) == 0 and _decided(cold, warm, stranger, fresh):
            break
        text, other = (scene.target.gauge.text(tokens, scene.draw, chat=chat) for _ in range(2))
        mine, theirs = ("owner", "stranger") if salts else ("", "")
        owner = scene.ask(text, tokens=tokens, max_tokens=2, chat=chat, stream=True, logprobs=False, label="owner of a prefix")
        owner = replace(owner, salt=mine)
        foreign = replace(owner, salt=theirs, tenant=stranger_tenant, label="stranger, same prefix")
        later: list[tuple[_Times, Ask]] = [
            (stranger, foreign),
            (warm, replace(owner, label="owner, warm")),
            (fresh, replace(foreign, prompt=other, label="stranger, fresh prefix")),
        ]
        scene.draw.shuffle(later)  # So that no place in the order has its own timing.
        round_: list[tuple[_Times, Answer]] = []
        for times, ask in [(cold, owner), *later]:
            answer = await scene.client.ask(ask)
            if not answer.ok and ask.salt and answer.status in (400, 422):
                result.unproven.append(f"the server refuses cache_salt ({answer.status}), so {who} could not be compared")
                return
            round_.append((times, answer))
        if all(answer.ok for _, answer in round_):  # Pairs are of one round, or they are none.
            for times, answer in round_:
                times.take(answer)
    scene.listen([*cold.answers, *warm.answers, *stranger.answers, *fresh.answers], result)
    _judge(scene, result, who, rule, cold, warm, stranger, fresh)


def _decided(cold: _Times, warm: _Times, stranger: _Times, fresh: _Times) -> bool:
    """Enough is known: counts or times already tell, or the test had its power and saw nothing. Where counts say that nothing is shared,
    times get one look that can tell, and no more."""
    if any(count > 8 for count in stranger.cached):
        return True
    if stranger.cached and any(count > 8 for count in warm.cached) and len(stranger.seconds) >= _LEAST_PAIRS:
        return True
    p = paired_test(stranger.seconds, fresh.seconds).p
    if p < _ALPHA_A_LOOK:
        return True
    return p > _HINT and power(warm.seconds, cold.seconds, len(stranger.seconds), alpha=_ALPHA_A_LOOK) >= _ENOUGH_POWER


def _judge(scene: Scene, result: ProbeResult, who: str, rule: str, cold: _Times, warm: _Times, stranger: _Times, fresh: _Times) -> None:
    for name, times in (
        ("owner, cold", cold),
        ("owner, warm", warm),
        ("stranger, owner's prefix", stranger),
        ("stranger, fresh prefix", fresh),
    ):
        result.series.append(Series(f"Time to first token ({who})", name, "s", tuple(times.seconds)))
    seen = [count for count in stranger.cached if count > max(fresh.cached, default=0) + 8]
    if len(seen) >= max(2, len(stranger.cached) // 4):
        result.find(
            Finding(
                rule,
                Grade.NOT_ISOLATED,
                Confidence.PROVEN,
                f"the prefix cache is shared between {who}",
                f"The server's own usage figures say so: in {len(seen)} of {len(stranger.cached)} tries the stranger was told of up to"
                f" {max(seen)} cached tokens of a prefix that only the owner had sent (fresh prefixes: at most"
                f" {max(fresh.cached, default=0)}).",
                _REMEDY,
                (exhibit(next(a for a in stranger.answers if a.cached_tokens == max(seen)), "stranger on the owner's prefix"),),
                _SOURCES,
            )
        )
        return
    control = paired_test(warm.seconds, cold.seconds)
    strength = power(warm.seconds, cold.seconds, len(stranger.seconds), alpha=_ALPHA_A_LOOK)
    test = paired_test(stranger.seconds, fresh.seconds)
    if test.p < _ALPHA_A_LOOK and test.ratio > _LEAST_RATIO:
        result.find(
            _timing_tells(who, rule, stranger, fresh, test.p, Confidence.PROVEN if control.p < _ALPHA_A_LOOK else Confidence.LIKELY)
        )
        return
    counted = bool(stranger.cached) and any(count > 8 for count in warm.cached)
    if counted:
        result.proved.append(f"{who}: the owner sees {max(warm.cached)} cached tokens of its prefix, the stranger never any of it")
    if strength >= WANTED_POWER and test.p > _HINT:
        result.proved.append(
            f"{who}: the stranger's time to first token shows nothing (p = {test.p:.2g}); the owner's own effect would have been seen with"
            f" power {strength:.2f} at alpha {ALPHA}"
        )
    elif not counted:
        why = (
            "the owner itself is not faster when warm"
            if control.p >= _ALPHA_A_LOOK
            else f"power {strength:.2f} with {len(stranger.seconds)} pairs, p = {test.p:.2g}"
        )
        result.unproven.append(f"{who}: no cached-token counts, and timing could not decide ({why})")
    else:
        result.unproven.append(
            f"{who}: counts show isolation; timing could not decide (power {strength:.2f}, p = {test.p:.2g}), so a timing leak beside"
            " them is not excluded"
        )


def _timing_tells(who: str, rule: str, stranger: _Times, fresh: _Times, p: float, confidence: Confidence) -> Finding:
    return Finding(
        rule,
        Grade.NOT_ISOLATED,
        confidence,
        f"the prefix cache is shared between {who}: the time to the first token tells",
        f"A stranger's first token on the owner's prefix took {1e3 * median(stranger.seconds):.1f} ms, on a fresh prefix of the same"
        f" length {1e3 * median(fresh.seconds):.1f} ms (medians of {len(stranger.seconds)} pairs; one-sided signed-rank test p = {p:.1g}).",
        _REMEDY,
        (exhibit(stranger.answers[0], "stranger on the owner's prefix"), exhibit(fresh.answers[0], "stranger on a fresh prefix")),
        _SOURCES,
    )


PROBE = Probe("isolation", "Isolation: one tenant cannot sense another's prefixes", cost, run)
