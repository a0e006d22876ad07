"""Keys, tenants and scopes: who may share prefixes with whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvseal.core.errors import ConfigError, Unauthenticated
from kvseal.serve.auth import KeyRing, Scopes


def _file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "keys"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "text",
    [
        "# comment\nkey-of-alice alice\n\nkey-of-bob bob # trailing\n",
        '{"key-of-alice": "alice", "key-of-bob": "bob"}',
        '{"keys": [{"key": "key-of-alice", "tenant": "alice"}, {"key": "key-of-bob", "tenant": "bob"}]}',
    ],
)
def test_key_files(tmp_path: Path, text: str) -> None:
    ring = KeyRing(_file(tmp_path, text))
    assert ring.required
    assert ring.count == 2
    assert ring.tenant("Bearer key-of-alice") == "alice"
    assert ring.tenant("bearer  key-of-bob") == "bob"
    for wrong in (None, "", "Bearer", "Bearer ", "Basic key-of-alice", "key-of-alice", "Bearer key-of-alic", "Bearer key-of-alicee"):
        with pytest.raises(Unauthenticated) as caught:
            ring.tenant(wrong)
        assert "key-of" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "# none\n",
     "justakey\n", "key a b\n", "short t\n", '{"keys": [{"key": "long-enough"}]}', '{"keys": [1]}', "{", '{"long-enough": 1}',
     "key-of-alice alice\nkey-of-alice bob\n"],
)  # fmt: skip
def test_key_files_that_cannot_be_meant(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="api-keys"):
        KeyRing(_file(tmp_path, text))


def test_a_broken_file_keeps_the_old_keys(tmp_path: Path) -> None:
    file = _file(tmp_path, "key-of-alice alice\n")
    ring = KeyRing(file)
    file.write_text("nonsense")
    with pytest.raises(ConfigError):
        ring.reload()
    assert ring.tenant("Bearer key-of-alice") == "alice"
    file.write_text("key-of-carol carol\n")
    ring.reload()
    assert ring.tenant("Bearer key-of-carol") == "carol"
    with pytest.raises(Unauthenticated):
        ring.tenant("Bearer key-of-alice")


def test_without_a_file_everybody_is_one_tenant() -> None:
    assert KeyRing(None).tenant(None) == ""


def test_scopes_separate_tenants_and_salts() -> None:
    scopes = Scopes(b"weights1")
    assert scopes.scope("a", "bc") == scopes.scope("a", "bc")
    assert len({scopes.scope("a", "bc"), scopes.scope("ab", "c"), scopes.scope("a", ""), scopes.scope("", "a")}) == 4
    assert Scopes(b"weights1").scope("a", "") != scopes.scope("a", ""), "the secret is this process's own"
