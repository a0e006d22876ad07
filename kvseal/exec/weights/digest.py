"""The name of a set of weights, by content.

Owns `weights_digest`. Laws L4k and L10: pages computed with other weights, another rotary embedding or another architecture bear another
format, and prefix keys differ.

Every tensor's name, type, shape and a sample of its bytes is digested, and the whole `ModelSpec`. The sample is the whole tensor up to
`WHOLE_BYTES`, and beyond that `SAMPLES` stretches of `SAMPLE_BYTES` spread evenly from the first byte to the last. Fine-tuning moves nearly
every weight, so two checkpoints that are used as different models differ in the sample; it is no defence against somebody who edits a
checkpoint to escape it, which would need write access to the operator's model files.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict

from kvseal.exec.spec import ModelSpec
from kvseal.exec.weights.checkpoint import Checkpoint

WHOLE_BYTES = 64 * 1024
SAMPLES = 16
SAMPLE_BYTES = 2048


def weights_digest(spec: ModelSpec, checkpoint: Checkpoint) -> bytes:
    """32 bytes. Reads at most max(WHOLE_BYTES, SAMPLES * SAMPLE_BYTES) of each tensor."""
    digest = hashlib.blake2b(digest_size=32, person=b"kvseal-weights")
    digest.update(_canonical(asdict(spec)).encode())
    for name in sorted(checkpoint.tensors):
        source = checkpoint.tensors[name]
        digest.update(f"|{name}|{source.type}|{source.shape}|{source.raw.size}|".encode())
        if source.raw.size <= WHOLE_BYTES:
            digest.update(source.raw.data)
            continue
        last = source.raw.size - SAMPLE_BYTES
        for index in range(SAMPLES):
            start = last * index // (SAMPLES - 1)
            digest.update(source.raw[start : start + SAMPLE_BYTES].data)
    return digest.digest()


def _canonical(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, tuple | list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return value.hex() if isinstance(value, float) else repr(value)
