"""Finds a model's config: a JSON file, a directory, a GGUF file, or a hub id. Owns every bound on what is read.

Untrusted input: size is checked before reading, depth by the parser, numbers later by `fields`. No network for anything on disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvseal.core.errors import ModelCorrupt, ModelNotFound
from kvseal.plan.gguf import MAGIC, read_gguf
from kvseal.plan.model import read_shape
from kvseal.plan.shape import ModelShape

MAX_CONFIG_BYTES = 8 * 2**20
"""The largest published config is 40 kB; per-layer lists of huge models stay far below this."""
MAX_DEPTH = 64
HUB_TIMEOUT_S = 10.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")


@dataclass(frozen=True, slots=True)
class Source:
    """A config with a name, and the bytes of weights next to it when they are there."""

    config: Mapping[str, Any]
    name: str
    where: str
    weight_bytes: int | None = None


def load_shape(model: str, *, assume_gqa: bool = False) -> ModelShape:
    """The shape of a model named in any of the four ways. Raises ModelNotFound, ModelCorrupt or ModelUnsupported."""
    source = find(model)
    return read_shape(source.config, source.name, assume_gqa=assume_gqa, file_bytes=source.weight_bytes)


def find(model: str) -> Source:
    if not model or "\0" in model or len(model) > 4096:
        raise ModelNotFound("the model is an empty or impossible name; give a config.json, a directory, a GGUF file or a hub id")
    path = Path(model)
    try:
        if path.is_dir():
            return _from_directory(path)
        if path.is_file():
            return _from_file(path)
        if path.exists():
            raise ModelCorrupt(f"{model} is neither a file nor a directory")
    except OSError as error:
        raise ModelNotFound(f"{model[:200]} cannot be read: {error.strerror or error}") from error
    if _HUB_ID.fullmatch(model) and not model.endswith((".json", ".gguf")):
        return _from_hub(model)
    raise ModelNotFound(f"{model[:200]} is not there, and is not a hub id (owner/name) either")


def _from_directory(path: Path) -> Source:
    config = path / "config.json"
    if config.is_file():
        data = read_json(config)
        quant = path / "hf_quant_config.json"
        if quant.is_file() and "quantization_config" not in data:
            data = {**data, "quantization_config": read_json(quant)}
        return Source(data, path.resolve().name, str(config), _weight_bytes(path))
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        return _from_file(ggufs[0])
    raise ModelNotFound(f"{path} has no config.json and no GGUF file")


def _from_file(path: Path) -> Source:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == MAGIC:
        header = read_gguf(path)
        return Source(header.config, path.stem, str(path), header.weight_bytes)
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return Source(read_json(path), name, str(path), _weight_bytes(path.parent) if path.name == "config.json" else None)


def _weight_bytes(directory: Path) -> int | None:
    """Sum of the safetensors files next to the config, or the total its index states."""
    index = directory / "model.safetensors.index.json"
    if index.is_file() and index.stat().st_size <= MAX_CONFIG_BYTES:
        metadata = read_json(index).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int) and not isinstance(total, bool) and 0 < total < 1 << 50:
            return total
    sizes = [file.stat().st_size for file in directory.glob("*.safetensors") if file.is_file()]
    return sum(sizes) or None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of bounded size and depth. Raises ModelCorrupt with the reason."""
    size = path.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise ModelCorrupt(f"{path.name} has {size:,} bytes; a config has at most {MAX_CONFIG_BYTES:,}")
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    return parse_json(data, path.name)


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    if len(data) > MAX_CONFIG_BYTES:
        raise ModelCorrupt(f"{name} has more than {MAX_CONFIG_BYTES:,} bytes; a config has far fewer")
    if data[:1] in (b"\x80", b"\x89", b"\x7f", b"P") or b"\0" in data[:256]:
        raise ModelCorrupt(f"{name} is binary; a config is JSON text")
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ModelCorrupt(f"{name} is not UTF-8 text; a config is JSON text") from None
    except RecursionError:
        raise ModelCorrupt(f"{name} is nested too deeply to be a config") from None
    except ValueError as error:
        raise ModelCorrupt(f"{name} is not JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{name} holds a {type(value).__name__}; a config is an object")
    if _too_deep(value):
        raise ModelCorrupt(f"{name} is nested more than {MAX_DEPTH} deep; a config is not")
    return value


def _too_deep(value: object) -> bool:
    """Level by level, so that depth costs no stack."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(item: object) -> list[object]:
    inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return [child for child in inner if isinstance(child, dict | list)]


def _from_hub(model: str) -> Source:
    """The config of a hub id: from the local hub cache, else one short and bounded request. huggingface_hub is imported only here."""
    try:
        from huggingface_hub import constants, get_token, hf_hub_url, try_to_load_from_cache
    except ImportError:
        raise ModelNotFound(f"{model} is not on disk, and huggingface_hub is not installed to fetch it") from None
    cached = try_to_load_from_cache(model, "config.json")
    if isinstance(cached, str):
        return Source(read_json(Path(cached)), model, f"hub cache: {model}")
    advice = "download its config.json and give the path"
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFound(f"{model} is neither on disk nor in the hub cache, and the hub is switched off; {advice}")
    return Source(parse_json(_request(hf_hub_url(model, "config.json"), get_token(), model, advice), "config.json"), model, f"hub: {model}")


def _request(url: str, token: str | None, model: str, advice: str) -> bytes:
    """One attempt. The token goes to the hub alone, never along a redirect."""
    import http.client
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers={"User-Agent": "kvseal-size"})
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S) as answer:
            data: bytes = answer.read(MAX_CONFIG_BYTES + 1)
            return data
    except urllib.error.HTTPError as error:
        why = "needs access rights that your token does not have" if error.code in (401, 403) else f"answers {error.code}"
        raise ModelNotFound(f"{model} is not on disk, and the hub {why}; {advice}") from None
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise ModelNotFound(f"{model} is not on disk, and the hub cannot be reached ({type(error).__name__}); {advice}") from None
