"""Values at rest: sealed, opened only as what they were sealed for, with a key of their own."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from sojourn.errors import HostUnfit, SecretsKeyInvalid
from sojourn.server.secret_store import KEY_FILE, SecretStore, open_secret_store

KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def _no_key_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOJOURN_SECRETS_KEY_FILE", raising=False)


def test_what_is_sealed_is_opened_and_never_looks_the_same() -> None:
    store = SecretStore(KEY)
    one, other = (store.seal(b"value", "secret", "t", "N") for _ in range(2))
    assert one != other and b"value" not in one + other
    assert store.open(one, "secret", "t", "N") == b"value"
    assert repr(store) == "SecretStore()"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("port", ("t", "N")),
        ("secret", ("u", "N")),
        ("secret", ("t", "M")),
        ("secret", ("tN",)),
        ("secret", ("t", "N", "")),
        ("secrett", ("N",)),
    ],
)
def test_it_is_opened_only_as_what_it_was_sealed_for(kind: str, names: tuple[str, ...]) -> None:
    store = SecretStore(KEY)
    with pytest.raises(SecretsKeyInvalid):
        store.open(store.seal(b"value", "secret", "t", "N"), kind, *names)


def test_another_key_and_damage_are_told_apart() -> None:
    sealed = SecretStore(KEY).seal(b"value", "secret", "t", "N")
    with pytest.raises(SecretsKeyInvalid, match="another key"):
        SecretStore(bytes(32)).open(sealed, "secret", "t", "N")
    for at in range(5, len(sealed)):
        damaged = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
        with pytest.raises(SecretsKeyInvalid, match="damaged"):
            SecretStore(KEY).open(damaged, "secret", "t", "N")
    for short in (b"", b"\x01", sealed[:10], b"\x02" + sealed[1:]):
        with pytest.raises(SecretsKeyInvalid, match="form"):
            SecretStore(KEY).open(short, "secret", "t", "N")


def test_a_key_is_made_once_and_is_its_owners(tmp_path: Path) -> None:
    sealed = open_secret_store(tmp_path, anything_sealed=False).seal(b"v", "secret", "t", "N")
    path = tmp_path / KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    again = open_secret_store(tmp_path, anything_sealed=True)
    assert again.open(sealed, "secret", "t", "N") == b"v"


def test_a_lost_key_is_not_made_anew(tmp_path: Path) -> None:
    with pytest.raises(SecretsKeyInvalid, match="gone"):
        open_secret_store(tmp_path, anything_sealed=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n"])
def test_a_named_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    named = tmp_path / "key"
    named.write_bytes(content)
    monkeypatch.setenv("SOJOURN_SECRETS_KEY_FILE", str(named))
    data = tmp_path / "data"
    data.mkdir()
    sealed = open_secret_store(data, anything_sealed=True).seal(b"v", "secret", "t", "N")
    assert SecretStore(KEY).open(sealed, "secret", "t", "N") == b"v"
    assert not list(data.iterdir())


@pytest.mark.parametrize("content", [b"", b"short", KEY[:31], KEY.hex().encode()[:-1], b"x" * 64])
def test_what_is_no_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    named = tmp_path / "key"
    named.write_bytes(content)
    monkeypatch.setenv("SOJOURN_SECRETS_KEY_FILE", str(named))
    with pytest.raises(HostUnfit) as refused:
        open_secret_store(tmp_path, anything_sealed=False)
    if content:
        assert content.decode() not in str(refused.value).replace(str(tmp_path), "")


def test_a_missing_named_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOJOURN_SECRETS_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(HostUnfit):
        open_secret_store(tmp_path, anything_sealed=False)
