"""GPUs by name: usual spellings of a whole name are one card, slips are none."""

from __future__ import annotations

import pytest

from kvseal.core.errors import ConfigError
from kvseal.plan.gpu import CATALOGUE, find_gpu

SPELLINGS = {
    "H100": "H100-80G",
    "h100_80gb": "H100-80G",
    "H10080GB": "H100-80G",
    "H100-80": "H100-80G",
    "NVIDIA H100 80GB HBM3": "H100-80G",
    "NVIDIA H100 PCIe": "H100-80G",
    "NVIDIA H100 NVL": "H100-94G",
    "A100-SXM4-40GB": "A100-40G",
    "A100 80 GB": "A100-80G",
    "h20": "H20-96G",
    "Tesla V100-SXM2-32GB": "V100-32G",
    "V100-32": "V100-32G",
    "RTX 5090": "RTX5090-32G",
    "4090": "RTX4090-24G",
    "NVIDIA GeForce RTX 4060 Ti": "RTX4060TI-16G",
    "NVIDIA RTX A6000": "RTX-A6000-48G",
    "NVIDIA RTX 6000 Ada Generation": "RTX6000ADA-48G",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTXPRO6000-96G",
    "NVIDIA GH200 480GB": "GH200-96G",
    "B200 192GB": "B200-180G",
    "AMD Instinct MI300X OAM": "MI300X-192G",
    "A10G": "A10-24G",
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_spellings_of_one_card(text: str) -> None:
    assert find_gpu(text).name == SPELLINGS[text]


@pytest.mark.parametrize("gpu", CATALOGUE, ids=lambda gpu: gpu.name)
def test_every_name_of_the_catalogue_is_itself(gpu: object) -> None:
    name = gpu.name  # type: ignore[attr-defined]
    assert find_gpu(name).name == find_gpu(name.lower().replace("-", " ") + "b").name == name


@pytest.mark.parametrize(
    "text",
    [
        "H1000",
        "H10",
        "A1000",
        "T400",
        "L400",
        "B2000",
        "H2000",
        "H",
        "100",
        "RTX",
        "RTX6000",
        "MI300",
        "H100H200",
        "H100 80GB 94GB",
        "GB20",
    ],
)
def test_a_digit_too_many_or_too_few_is_another_card(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not in the catalogue; near names: .*--gpu-memory-gib"):
        find_gpu(text)


@pytest.mark.parametrize(
    ("text", "near"), [("H1000", "H100-80G"), ("H100 96GB", "H100-94G"), ("L400", "L40-48G"), ("MI300", "MI300X-192G")]
)
def test_what_is_near_is_named(text: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"near names: .*{near}"):
        find_gpu(text)


@pytest.mark.parametrize("text", ["", " ", "-", "nvidia", "NVIDIA GeForce"])
def test_a_name_without_a_card(text: str) -> None:
    with pytest.raises(ConfigError, match="names no card"):
        find_gpu(text)
