"""GPUs by name, with the memory that the driver shows, which is what engines compute with.

Owns the catalogue. Nominal sizes are the makers' data sheets; visible sizes come from published start-up logs where there is one
(H100 79.18 GiB: llm-d-planner's measurements; RTX 3090 23.58, RTX 5090 31.4, A40 46,068 MiB: issue reports), else 98.5 % of nominal.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def find_gpu(name: str) -> GPU:
    """A GPU by any spelling of its name; `H100` alone means the commonest size. Raises ConfigError with near names."""
    wanted = _plain(name)
    if not wanted:
        raise ConfigError("--gpu is empty")
    exact = [gpu for gpu in CATALOGUE if _plain(gpu.name) == wanted]
    if exact:
        return exact[0]
    based = [gpu for gpu in CATALOGUE if _plain(gpu.name.rsplit("-", 1)[0]) == wanted]
    if based:
        return based[0]
    starts = [gpu for gpu in CATALOGUE if _plain(gpu.name).startswith(wanted) or wanted.startswith(_plain(gpu.name.rsplit("-", 1)[0]))]
    sized = [gpu for gpu in starts if _plain(gpu.name.rsplit("-", 1)[1]).rstrip("g") in wanted]
    for found in (sized, starts):
        if found:
            return min(found, key=lambda gpu: (-len(_common(_plain(gpu.name), wanted)), CATALOGUE.index(gpu)))
    near = [gpu.name for gpu in CATALOGUE if _plain(gpu.name)[:2] == wanted[:2]] or [gpu.name for gpu in CATALOGUE[:8]]
    raise ConfigError(
        f"--gpu {name[:40]!r} is not in the catalogue; near names: {', '.join(near)}; "
        "or give its memory with --gpu-memory-gib (as the driver shows it)"
    )


def _plain(name: str) -> str:
    """Letters and digits only, without maker, form factor and the B of GB."""
    text = name.lower()
    for word in ("nvidia", "geforce", "amd", "instinct", "sxm5", "sxm4", "sxm", "pcie", "hbm3e", "hbm3", "hbm2e", "nvl", "tensor core"):
        text = text.replace(word, "")
    text = "".join(char for char in text if char.isalnum())
    return text.removesuffix("ib").removesuffix("b") if text.endswith(("gb", "gib")) else text


def _common(left: str, right: str) -> str:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return left[:count]
