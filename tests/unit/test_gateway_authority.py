"""The deployment's certificate authority."""

from __future__ import annotations

import datetime
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from sojourn.gateway import authority as module
from sojourn.gateway.authority import Authority, open_authority, trusted


def shake_hands(authority: Authority, host: str, trusted: bytes, *, least: str = "") -> str | None:
    """A strict program inside meets a certificate; which TLS they agreed on."""
    program = ssl.create_default_context(cadata=trusted.decode())
    program.verify_flags |= ssl.VERIFY_X509_STRICT
    program.set_alpn_protocols(["h2", "http/1.1"])
    if least:
        program.minimum_version = ssl.TLSVersion.TLSv1_2
        program.maximum_version = ssl.TLSVersion[least]
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    inside = program.wrap_bio(a, b, server_hostname=host)
    gateway = authority.context(host).wrap_bio(b, a, server_side=True)
    for _ in range(4):
        for side in (inside, gateway):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert inside.selected_alpn_protocol() == "http/1.1"
    inside.getpeercert()
    return inside.version()


@pytest.mark.parametrize(
    "host",
    [
        *("example.com", "a_b.example.com", "xn--bcher-kva.example", "10.0.0.1", "2606:2800::1"),
        "a" * 60 + "." + "b" * 60 + ".example.com",
    ],
)
def test_strict_programs_accept_its_certificates(tmp_path: Path, host: str) -> None:
    authority = open_authority(tmp_path)
    if "_" in host:
        with pytest.raises(ssl.SSLError):
            shake_hands(authority, "other.example.com", open_authority(tmp_path / "other").pem)
    assert shake_hands(authority, host, authority.pem) == "TLSv1.3"
    assert shake_hands(authority, host, authority.pem, least="TLSv1_2") == "TLSv1.2"


def test_it_is_made_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: open_authority(tmp_path / "new").pem, range(16)))
    assert len(set(found)) == 1
    assert (tmp_path / "new" / "ca.pem").read_bytes() == found[0]
    assert (tmp_path / "new" / "ca.key").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["ca.key", "ca.pem"]


def test_it_is_renewed_with_the_same_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DAYS", 300)
    old = open_authority(tmp_path).pem
    monkeypatch.setattr(module, "_DAYS", 3650)
    renewed = open_authority(tmp_path)
    assert renewed.pem != old
    assert open_authority(tmp_path).pem == renewed.pem
    # A sandbox that knows the old certificate goes on.
    assert shake_hands(renewed, "example.com", old) == "TLSv1.3"


def test_a_certificate_that_is_not_the_keys_is_made_anew(tmp_path: Path) -> None:
    open_authority(tmp_path)
    other = open_authority(tmp_path / "other").pem
    (tmp_path / "ca.pem").write_bytes(other)
    assert open_authority(tmp_path).pem != other


def test_what_is_to_be_trusted_takes_no_process(tmp_path: Path) -> None:
    told = trusted(tmp_path)
    assert told == open_authority(tmp_path).pem == trusted(tmp_path)


def test_it_may_sign_for_no_other_authority(tmp_path: Path) -> None:
    certificate = x509.load_pem_x509_certificate(open_authority(tmp_path).pem)
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (basic.ca, basic.path_length) == (True, 0)
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert left > datetime.timedelta(days=3600)


def test_contexts_are_kept_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = open_authority(tmp_path)
    assert authority.context("a.com") is authority.context("a.com")
    monkeypatch.setattr(module, "_MOST_LEAVES", 2)
    first = authority.context("a.com")
    for name in ("b.com", "c.com"):
        authority.context(name)
    assert authority.context("a.com") is not first


def test_the_key_is_in_no_representation(tmp_path: Path) -> None:
    authority = open_authority(tmp_path)
    key = (tmp_path / "ca.key").read_bytes()
    loaded = serialization.load_pem_private_key(key, None)
    assert loaded is not None
    assert b"PRIVATE" not in authority.pem
    assert "PRIVATE" not in repr(authority) + repr(vars(authority))
