"""KV formats: how many bytes one token takes in one head, one latent vector or one index key.

Owns the table of sizing note 1.11. Sources: KVQuantMode and TurboQuantConfig of vLLM 0.33, ggml block sizes, SGLang's NVFP4 and MXFP8
pools. A format that is published but in no release read here (KVarN) is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvseal.core.errors import ConfigError
from kvseal.plan.units import cdiv

LATENT_LAYOUTS = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes per token of the packed layouts for a 512 + 64 latent: 512 fp8 + 4 float32 scales + 64 bf16; and its 4-bit sister."""
_GGML = {"q8_0": (34, 32), "q4_0": (18, 32), "q4_1": (20, 32), "q5_0": (22, 32), "q5_1": (24, 32), "iq4_nl": (18, 32)}
_TURBO = {"turboquant_k8v4": (8, 4), "turboquant_4bit_nc": (4, 4), "turboquant_k3v4_nc": (3, 4), "turboquant_3bit_nc": (3, 3)}
_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_ALIASES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "f16": "fp16", "float32": "fp32", "f32": "fp32", "float": "fp32",
    "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "fp8_inc": "fp8", "float8_e4m3fn": "fp8", "fp8_per_tensor": "fp8", "int8": "int8_per_token_head",
    "int4": "int4_per_token_head", "fp4_e2m1": "nvfp4", "fp4": "nvfp4", "raw576": "fp8_raw",
}  # fmt: skip
NAMES = (
    "auto", "bf16", "fp16", "fp32", "fp8", "fp8_raw", "fp8_ds_mla", "nvfp4_ds_mla", "fp8_per_token_head", "int8_per_token_head",
    "int4_per_token_head", "int8", "int4", "nvfp4", "mxfp8", "ultraquant_4bit", *_TURBO, *_GGML,
)  # fmt: skip


class FormatMissing(ConfigError):
    """The format does not exist for one of the model's caches."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One format by its plain name. `None` from a method means: this format does not exist for that sort of cache."""

    name: str

    def side_bytes(self, dim: int) -> int:
        """K or V of one token and one head, for formats that treat both alike."""
        name = self.name
        if name in _ELEMENT:
            return dim * _ELEMENT[name]
        if name in ("fp8_per_token_head", "int8_per_token_head"):
            return dim + 4
        if name == "int4_per_token_head":
            return cdiv(dim, 2) + 4
        if name == "nvfp4":
            return cdiv(dim, 2) + cdiv(dim, 16)
        if name == "mxfp8":
            return dim + cdiv(dim, 32)
        if name == "ultraquant_4bit":
            return cdiv(dim, 2) + cdiv(dim, 32)
        if name in _GGML:
            size, block = _GGML[name]
            return cdiv(dim, block) * size
        raise FormatMissing(f"--kv-dtype {name} does not fit ordinary K and V heads; it is a layout of multi-head latent attention")

    def head_bytes(self, k_dim: int, v_dim: int) -> int:
        """K and V together, one token, one head."""
        if self.name in _TURBO:
            k_bits, v_bits = _TURBO[self.name]
            key = k_dim if k_bits == 8 else cdiv(k_dim * k_bits, 8) + 2
            size = key + cdiv(v_dim * v_bits, 8) + 4
            return size + size % 2
        return self.side_bytes(k_dim) + self.side_bytes(v_dim)

    def latent_bytes(self, latent_dim: int, rope_dim: int) -> int | None:
        """One MLA vector. Per-head formats have no meaning here: None."""
        if self.name in LATENT_LAYOUTS:
            packed = LATENT_LAYOUTS[self.name]
            return packed if (latent_dim, rope_dim) == (512, 64) else None
        if self.name in _ELEMENT:
            return (latent_dim + rope_dim) * _ELEMENT[self.name]
        if self.name == "fp8_raw":
            return latent_dim + rope_dim
        if self.name in _GGML:
            return self.side_bytes(latent_dim + rope_dim)
        if self.name == "nvfp4":
            return cdiv(latent_dim + rope_dim, 2) + cdiv(latent_dim + rope_dim, 16)
        return None

    @property
    def element_bytes(self) -> int:
        """Bytes of one plain element; one for every 8-bit and smaller format."""
        return _ELEMENT.get(self.name, 1)

    @property
    def is_quantised(self) -> bool:
        return self.name not in ("bf16", "fp16", "fp32")


def parse_format(name: str) -> KVFormat:
    """A format by any of its public names, except `auto`, which needs a model."""
    plain = _ALIASES.get(name.lower(), name.lower())
    if plain.startswith(("kvarn", "octave")):
        raise ConfigError(f"--kv-dtype {name}: no released engine read here stores it, so its bytes are not known; choose another format")
    if plain == "auto" or plain not in NAMES:
        raise ConfigError(f"--kv-dtype {name[:40]!r} is unknown; choose from {', '.join(NAMES)}")
    return KVFormat(plain)


BF16 = KVFormat("bf16")


def index_bytes(index_dim: int) -> int:
    """A DSA index key: fp8 plus one float32 scale per 128, whatever the KV dtype."""
    return index_dim + cdiv(index_dim, 128) * 4
