"""GPUs by name, with the memory that the driver shows, which is what engines compute with.

Owns the catalogue. Nominal sizes are the makers' data sheets; visible sizes come from published start-up logs where there is one
(H100 79.18 GiB: llm-d-planner's measurements; RTX 3090 23.58, RTX 5090 31.4, A40 46,068 MiB: issue reports), else 98.5 % of nominal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from kvseal.core.errors import ConfigError
from kvseal.plan.units import GIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    name: str
    memory_bytes: int
    """Visible to the driver."""
    source: str


def _gpu(name: str, visible_gib: float, source: str) -> GPU:
    return GPU(name=name, memory_bytes=int(visible_gib * GIB), source=source)


_SHEET = "data sheet, less what the driver keeps"
_LOG = "published start-up log"
CATALOGUE = (
    _gpu("H100-80G", 79.18, _LOG), _gpu("H100-94G", 93.1, _SHEET), _gpu("H200-141G", 139.8, _LOG), _gpu("H20-96G", 95.0, _SHEET),
    _gpu("H20-141G", 139.8, _SHEET), _gpu("H800-80G", 79.18, _LOG), _gpu("A100-80G", 79.25, _LOG), _gpu("A100-40G", 39.49, _LOG),
    _gpu("A800-80G", 79.25, _SHEET), _gpu("A40-48G", 46068 * MIB / GIB, _LOG), _gpu("A30-24G", 23.6, _SHEET), _gpu("A10-24G", 22.0, _LOG),
    _gpu("L4-24G", 22.0, _LOG), _gpu("L20-48G", 47.5, _SHEET), _gpu("L40-48G", 44.4, _LOG), _gpu("L40S-48G", 44.4, _LOG),
    _gpu("B200-180G", 178.3, _LOG), _gpu("B300-288G", 275.0, _SHEET), _gpu("GB200-186G", 184.0, _SHEET), _gpu("GB300-288G", 276.0, _SHEET),
    _gpu("GH200-96G", 94.5, _LOG), _gpu("GH200-144G", 141.0, _SHEET), _gpu("RTX3090-24G", 23.58, _LOG), _gpu("RTX4090-24G", 23.6, _LOG),
    _gpu("RTX5090-32G", 31.4, _LOG), _gpu("RTX4080-16G", 15.7, _SHEET), _gpu("RTX-A6000-48G", 47.5, _LOG),
    _gpu("RTX6000ADA-48G", 47.5, _LOG),
    _gpu("RTXPRO6000-96G", 94.97, _LOG), _gpu("RTX-A5000-24G", 23.7, _SHEET), _gpu("RTX-A4000-16G", 15.7, _SHEET),
    _gpu("T4-16G", 14.7, _LOG),
    _gpu("V100-16G", 15.8, _LOG), _gpu("V100-32G", 31.7, _LOG), _gpu("MI210-64G", 63.98, _SHEET), _gpu("MI250X-64G", 63.98, _SHEET),
    _gpu("MI300X-192G", 191.98, _LOG), _gpu("MI325X-256G", 255.98, _SHEET), _gpu("MI355X-288G", 287.98, _SHEET),
    _gpu("GB10-128G", 119.7, _LOG), _gpu("P40-24G", 23.9, _SHEET), _gpu("RTX3060-12G", 11.8, _SHEET), _gpu("RTX5080-16G", 15.5, _SHEET),
    _gpu("RTX3080-10G", 9.8, _SHEET), _gpu("RTX2080TI-11G", 10.7, _SHEET), _gpu("RTX4060TI-16G", 15.6, _SHEET),
)  # fmt: skip


_NOISE = re.compile(
    r"nvidia|geforce|amd|instinct|tesla|radeon|gpu|sxm\d?|pcie|oam|hbm\d?e?|nvl\d+|tensor|core|generation|blackwell|server|workstation|max|q|edition"
)
"""Words of a name that say nothing of the memory: maker, form factor, generation."""
_SIZE = re.compile(r"([0-9]+)(?:g|gb|gib)")
_ALIASES = {
    "h100nvl": "H100-94G", "h200nvl": "H200-141G", "a10g": "A10-24G", "mi250": "MI250X-64G", "rtx3090ti": "RTX3090-24G",
    "rtx4090d": "RTX4090-24G", "rtx5090d": "RTX5090-32G", "rtx4080super": "RTX4080-16G",
}  # fmt: skip
"""Other cards with the memory of one in the catalogue."""
NEARLY = 0.1
"""Makers, drivers and clouds round sizes differently: a card that comes in one size has that one within this share."""


def find_gpu(name: str) -> GPU:
    """A GPU by any spelling of its whole name, words in any order; `H100` alone means the commonest size. Part of a name, or a name with a
    digit too many, is another card: ConfigError with near names."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and not _NOISE.fullmatch(word)]
    if not words:
        raise ConfigError("--gpu names no card")
    for gpu in CATALOGUE:
        if "".join(words).removesuffix("b") == _base(gpu) + f"{_nominal(gpu)}g":
            return gpu
    for model, size in _readings(words):
        if model == "gh200" and size == 480:  # the driver counts the CPU's memory in the name
            size = 96
        cards = [gpu for gpu in CATALOGUE if gpu.name == _ALIASES.get(model) or model in (_base(gpu), _base(gpu).removeprefix("rtx"))]
        for gpu in cards:
            if size is None or _nominal(gpu) == size or (len(cards) == 1 and abs(size / _nominal(gpu) - 1) <= NEARLY):
                return gpu
        if cards:
            raise _unknown(name, [gpu.name for gpu in cards])
    raise _unknown(name, _near("".join(words)))


def _base(gpu: GPU) -> str:
    """`rtxa6000` of RTX-A6000-48G."""
    return gpu.name.rsplit("-", 1)[0].lower().replace("-", "")


def _nominal(gpu: GPU) -> int:
    """GB as the catalogue's name says."""
    return int(gpu.name.rsplit("-", 1)[1].removesuffix("G"))


def _readings(words: list[str]) -> Iterator[tuple[str, int | None]]:
    """Model and size (GB) that a name can mean: sizes have a unit, else the last number may be one (`H100-80`, but `RTX 5090`)."""
    plain = re.sub(r"\b([0-9]+) (gb?|gib)\b", r"\1g", " ".join(words)).split()
    sizes = [int(match.group(1)) for word in plain if (match := _SIZE.fullmatch(word))]
    model = [word for word in plain if not _SIZE.fullmatch(word)]
    if len(sizes) <= 1:
        yield "".join(model), sizes[0] if sizes else None
    if not sizes and len(model) > 1 and model[-1].isdigit():
        yield "".join(model[:-1]), int(model[-1])


def _near(wanted: str) -> list[str]:
    """Catalogue names of which the wanted one may be a slip, best first."""
    bases = list(dict.fromkeys(_base(gpu) for gpu in CATALOGUE))
    close = get_close_matches(_SIZE.sub("", wanted) or wanted, bases, n=5, cutoff=0.6)
    close += [base for base in bases if base[:2] == wanted[:2] and base not in close]
    return [gpu.name for base in close[:8] for gpu in CATALOGUE if _base(gpu) == base] or [gpu.name for gpu in CATALOGUE[:8]]


def _unknown(name: str, near: list[str]) -> ConfigError:
    return ConfigError(
        f"--gpu {name[:40]!r} is not in the catalogue; near names: {', '.join(near)}; "
        "or give its memory with --gpu-memory-gib (as the driver shows it)"
    )
