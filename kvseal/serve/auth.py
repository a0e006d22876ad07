"""Who asks: API keys, their tenants, and the scope that a request may share prefixes in.

Owns the key file and `KeyRing`. Law L4: the scope comes from the key's tenant; a salt from the caller can only make it narrower. Keys are
kept as digests and compared in constant time; no key is ever logged.

The key file is either lines ``KEY TENANT`` (# starts a comment), or JSON: ``{"KEY": "TENANT"}`` or
``{"keys": [{"key": "KEY", "tenant": "TENANT"}]}``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from pathlib import Path

from kvseal.core.errors import ConfigError, Unauthenticated
from kvseal.core.files import read_text
from kvseal.core.ids import Scope
from kvseal.kv.prefix_key import SECRET_BYTES, scope_id

MIN_KEY_CHARS = 8
NO_TENANT = ""
"""The one tenant of a server without keys."""


class KeyRing:
    """The keys in force. Without a file everybody is the one nameless tenant."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._tenants: tuple[tuple[bytes, str], ...] = ()
        self.reload()

    @property
    def required(self) -> bool:
        return self._file is not None

    @property
    def count(self) -> int:
        return len(self._tenants)

    def reload(self) -> None:
        """Reads the file again. Raises `ConfigError` and changes nothing when it is wrong."""
        if self._file is not None:
            self._tenants = tuple((_digest(key), tenant) for key, tenant in _read(self._file).items())

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an ``Authorization`` header. Raises `Unauthenticated`."""
        if self._file is None:
            return NO_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("this server needs an API key: send the header Authorization: Bearer KEY")
        given = _digest(key.strip())
        found: str | None = None
        for digest, tenant in self._tenants:  # All of them, every time, so that time tells nothing.
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise Unauthenticated("the API key is not one of this server's")
        return found


class Scopes:
    """Makes scopes from tenants and salts, under a secret that lives as long as this process, or one that several servers share."""

    def __init__(self, weights_digest: bytes, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(2 * SECRET_BYTES) if secret is None else secret
        self._weights_digest = weights_digest

    def scope(self, tenant: str, salt: str, adapter: str = "") -> Scope:
        return scope_id(self._secret, tenant, salt, adapter, self._weights_digest)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read(file: Path) -> dict[str, str]:
    try:
        text = read_text(file)
    except OSError as error:
        raise ConfigError(f"--api-keys: {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-keys: {file} cannot be read: it is not UTF-8 (byte {error.start})") from error
    keys = _from_json(text, file) if text.lstrip().startswith("{") else _from_lines(text, file)
    if not keys:
        raise ConfigError(f"--api-keys: {file} holds no key, so nobody could use the server")
    for key in keys:
        if len(key) < MIN_KEY_CHARS or any(char.isspace() for char in key):
            raise ConfigError(f"--api-keys: {file} holds a key that is shorter than {MIN_KEY_CHARS} characters or has spaces in it")
    return keys


def _from_lines(text: str, file: Path) -> dict[str, str]:
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split("#", 1)[0].split()
        if fields and len(fields) != 2:
            raise ConfigError(f"--api-keys: line {number} of {file} is not KEY TENANT")
        if fields:
            _put(keys, fields[0], fields[1], file)
    return keys


def _from_json(text: str, file: Path) -> dict[str, str]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--api-keys: {file} starts like JSON but is none") from error
    listed = value.get("keys")
    pairs = [_pair(entry) for entry in listed] if isinstance(listed, list) else list(value.items())
    keys: dict[str, str] = {}
    for key, tenant in pairs:
        if not isinstance(key, str) or not isinstance(tenant, str) or not tenant:
            raise ConfigError(f"--api-keys: {file} has an entry without a key and a tenant, both strings")
        _put(keys, key, tenant, file)
    return keys


def _pair(entry: object) -> tuple[object, object]:
    return (entry.get("key"), entry.get("tenant")) if isinstance(entry, dict) else (None, None)


def _put(keys: dict[str, str], key: str, tenant: str, file: Path) -> None:
    if keys.setdefault(key, tenant) != tenant:
        raise ConfigError(f"--api-keys: {file} gives one key to two tenants")
