"""Offline: what the operator can show tells more than any question asked from outside.

Compares the pool with the context in a start-up log or in metrics, looks at the settings that decide whether a failed or aborted transfer
can be read, and at installed versions with published faults. Sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvseal.audit.advisories import Advisories, Advisory, version_key
from kvseal.audit.findings import Confidence, Finding, Grade, ProbeResult
from kvseal.audit.logs import StartLog
from kvseal.audit.metrics import Samples

TITLE = "Offline: pool against context, settings that matter, versions with published faults"


@dataclass(slots=True)
class Shown:
    """What the operator gave. None means that it was not given."""

    log: StartLog | None = None
    metrics: Samples | None = None
    packages: dict[str, str] | None = None
    context_tokens: int | None = None
    notes: list[str] = field(default_factory=list)

    def anything(self) -> bool:
        return self.log is not None or self.metrics is not None or self.packages is not None


def look(shown: Shown, advisories: Advisories) -> ProbeResult:
    """The result of the probe; there is no way for it to fail."""
    result = ProbeResult("offline", TITLE)
    _pool_against_context(shown, result)
    _own_counters(shown, result)
    if shown.log is not None:
        _settings(shown.log, result)
    _versions(shown, result, advisories)
    result.unproven += shown.notes
    return result


def _pool_against_context(shown: Shown, result: ProbeResult) -> None:
    pools = [("the log", shown.log.pool_tokens)] if shown.log is not None else []
    contexts = [("the log", shown.log.context_tokens)] if shown.log is not None else []
    if shown.metrics is not None:
        pools.append(("the metrics", shown.metrics.pool_tokens()))
        contexts.append(("the metrics", shown.metrics.context_tokens()))
    contexts.append(("the server or --context", shown.context_tokens))
    pool = min(((value, name) for name, value in pools if value), default=None)
    context = max(((value, name) for name, value in contexts if value), default=None)
    if pool is None or context is None:
        if shown.log is not None or shown.metrics is not None:
            missing = "KV pool" if pool is None else "context"
            result.unproven.append(f"neither log nor metrics state the {missing} in words that are known, so the two could not be compared")
        return
    if pool[0] >= context[0]:
        result.proved.append(
            f"the KV pool holds {pool[0]} tokens ({pool[1]}), the context is {context[0]} ({context[1]}): one full request fits"
        )
        return
    result.find(
        Finding(
            "offline.pool-below-context",
            Grade.LIMIT,
            Confidence.PROVEN,
            "the KV pool is smaller than the context",
            f"The pool holds {pool[0]} tokens (by {pool[1]}), the context is {context[0]} (by {context[1]}):"
            f" {100 * pool[0] / context[0]:.3g} % of it. A prompt between the two is accepted and cannot be computed.",
            f"Set the context to {pool[0]} or less, or enlarge the pool.",
            sources=("https://github.com/sgl-project/sglang/issues/30233", "https://github.com/sgl-project/sglang/issues/4048"),
        )
    )


def _own_counters(shown: Shown, result: ProbeResult) -> None:
    """Counters by which an engine itself says that its checks have fired."""
    if shown.metrics is None:
        return
    broken = shown.metrics.total("kvseal_broken_seals_total")
    if broken is not None and broken > 0:
        result.find(
            Finding(
                "offline.broken-seals",
                Grade.CORRUPTION,
                Confidence.PROVEN,
                "the server's own integrity checks have stopped requests",
                f"kvseal_broken_seals_total is {broken:g}.",
                "Read the server's log for the law and the pages, and report it.",
            )
        )
    elif broken is not None:
        result.proved.append("the server's integrity checks run, and none has fired")


def _settings(log: StartLog, result: ProbeResult) -> None:
    settings = log.settings
    if log.engine == "sglang" and settings.get("disaggregation_mode", "null") not in ("null", "none"):
        _sglang_disaggregation(settings, result)
    elif log.engine == "sglang" and "disaggregation_mode" in settings:
        result.proved.append("SGLang runs without disaggregation, so its transfer settings do not matter")
    if log.engine == "sglang":
        canary = settings.get("kv_canary")
        if canary in ("log", "raise"):
            result.proved.append(f"SGLang's KV canary is on ({canary})")
        else:
            result.unproven.append("SGLang's KV canary is off or not stated (--kv-canary raise checks pages at run time)")
    if log.engine == "vllm" and "kv_connector" in settings:
        policy = settings.get("kv_load_failure_policy")
        if policy == "fail":
            result.proved.append("vLLM fails a request whose KV could not be loaded (kv_load_failure_policy fail)")
        elif policy is not None:
            _found_setting(
                result,
                "offline.load-failure-policy",
                f"vLLM's kv_load_failure_policy is {policy}",
                "A load that fails unnoticed in part is then not an error of the request.",
                "Set kv_load_failure_policy to fail.",
                "https://github.com/vllm-project/vllm/issues/52234",
            )
        else:
            result.unproven.append("vLLM uses a KV connector; the log does not state kv_load_failure_policy (set it to fail)")
    if settings.get("kv_unified") == "true" and int(settings["n_slots"]) > 1:
        result.unproven.append(
            f"{settings['n_slots']} slots of llama.cpp promise {log.context_tokens} tokens each and share {log.pool_tokens}: requests that"
            " together need more may fail, which only a crowd of long ones shows"
        )
    trained = settings.get("n_ctx_train")
    if trained is not None and log.context_tokens is not None and log.context_tokens < int(trained):
        result.proved.append(
            f"llama.cpp serves {log.context_tokens} tokens a slot of the {trained} that the model was trained for, and says so"
        )


def _sglang_disaggregation(settings: dict[str, str], result: ProbeResult) -> None:
    if settings.get("disaggregation_enable_kv_checksum") == "true":
        result.proved.append("SGLang checks each KV transfer by checksum")
    else:
        _found_setting(
            result,
            "offline.no-kv-checksum",
            "SGLang moves KV between nodes without a checksum",
            "disaggregation_mode is set and disaggregation_enable_kv_checksum is not: a short, torn or late transfer is decoded as it is.",
            "Start with --disaggregation-enable-kv-checksum (0.5.22 and later).",
            "https://github.com/sgl-project/sglang/pull/39500",
        )
    if settings.get("disaggregation_enable_deferred_release") == "false":
        _found_setting(
            result,
            "offline.no-deferred-release",
            "SGLang frees pages of aborted requests while a transfer may still write them",
            "disaggregation_enable_deferred_release is off.",
            "Leave deferred release on.",
            "https://github.com/sgl-project/sglang/pull/35049",
        )


def _found_setting(result: ProbeResult, rule: str, title: str, proof: str, remedy: str, source: str) -> None:
    result.find(Finding(rule, Grade.SETTING, Confidence.PROVEN, title, proof, remedy, sources=(source,)))


def _versions(shown: Shown, result: ProbeResult, advisories: Advisories) -> None:
    packages = dict(shown.packages or {})
    if shown.log is not None and shown.log.version and shown.log.engine in ("vllm", "sglang"):
        packages.setdefault(shown.log.engine, shown.log.version)
    if not packages:
        if shown.packages is not None:
            result.unproven.append("no package versions could be read (give the output of pip freeze, or env)")
        return
    for advisory, version in advisories.affecting(packages):
        result.find(_advisory(advisory, version))
    known = sorted(name for name in packages if name in advisories.packages())
    if odd := [f"{name} {packages[name][:40]}" for name in known if version_key(packages[name]) is None]:
        result.unproven.append(f"no version that can be compared: {', '.join(odd)}")
    elif known and not any(finding.grade is Grade.ADVISORY for finding in result.findings):
        result.proved.append(
            f"{', '.join(f'{name} {packages[name]}' for name in known)}: none of {len(advisories.all)} known faults applies"
        )
    elif not known:
        result.unproven.append(f"none of the {len(packages)} packages is one that the advisories of {advisories.updated} speak of")


def _advisory(advisory: Advisory, version: str) -> Finding:
    until = f"fixed in {advisory.fixed}" if advisory.fixed else f"known up to {advisory.last_affected}; the record names no fixed version"
    return Finding(
        f"advisory.{advisory.id}",
        Grade.ADVISORY,
        Confidence.LIKELY,
        f"{advisory.package} {version}: {advisory.title}",
        f"{advisory.id} ({advisory.grade}), {until}. It needs: {advisory.when}."
        + (f" How the version is known: {advisory.evidence}." if advisory.evidence else ""),
        f"Upgrade {advisory.package} to {advisory.fixed or 'a version after ' + advisory.last_affected}.",
        sources=advisory.sources,
    )
