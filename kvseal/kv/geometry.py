"""The shape of the cache: how many bytes a token, a page and a layer's run take, and where in a page they lie.

Owns every size and offset of the arena; kernels and transports take theirs from here. Law L10: `format` names everything that would
make the same bytes mean something else.

A page is `layers` sections one after the other; a section is ``[seal 64 B][K run][V run]``, each run padded to 64 bytes.
A run holds, for each KV head, `page_tokens` vectors of `head_dim` elements: ``[kv_head][slot][dim]``, so that one head's keys
are contiguous. Quantised dtypes put one float32 scale per slot and head behind the elements of the whole run: ``[kv_head][slot]``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from kvseal.kv.seal import SEAL_BYTES

ALIGNMENT_BYTES = 64


class KVDtype(StrEnum):
    """How K and V elements are stored. int8 and int4 are scaled per token and head; int4 holds vectors turned by a Hadamard transform."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def element_bits(self) -> int:
        return {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}[self.value]

    @property
    def scale_bytes(self) -> int:
        """Per token, head, and K or V."""
        return 4 if self in (KVDtype.INT8, KVDtype.INT4) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Immutable; every derived size is a property."""

    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: KVDtype = KVDtype.FP16
    page_tokens: int = 16
    weights_digest: bytes = b""
    """What the K and V were computed with: weights, adapter and rope (L4k, L10)."""

    @property
    def element_run_bytes(self) -> int:
        """The elements of one K (or V) run, without scales and padding."""
        return self.kv_heads * self.page_tokens * self.head_dim * self.kv_dtype.element_bits // 8

    @property
    def run_bytes(self) -> int:
        """One K (or V) run of one layer, padded."""
        scales = self.kv_heads * self.page_tokens * self.kv_dtype.scale_bytes
        return _aligned(self.element_run_bytes + scales)

    @property
    def section_bytes(self) -> int:
        """One layer of one page: seal, K run, V run."""
        return SEAL_BYTES + 2 * self.run_bytes

    @property
    def page_bytes(self) -> int:
        return self.layers * self.section_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers, scales included, seals and padding not."""
        per_head = self.head_dim * self.kv_dtype.element_bits // 8 + self.kv_dtype.scale_bytes
        return 2 * self.layers * self.kv_heads * per_head

    @property
    def format(self) -> int:
        """Unsigned 64-bit name of weights, dtype and layout; never 0."""
        layout = 2 if self.kv_dtype is KVDtype.INT4 else 1
        text = f"kvseal-layout-{layout}|{self.layers}|{self.kv_heads}|{self.head_dim}|{self.kv_dtype}|{self.page_tokens}|".encode()
        digest = hashlib.blake2b(text + self.weights_digest, digest_size=8, person=b"kvseal-format").digest()
        return int.from_bytes(digest, "little") or 1

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
