"""Buckets that check who asks, and servers that show a certificate."""

from __future__ import annotations

import datetime
import ipaddress
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sojourn.errors import StoreRefused
from sojourn.repository.backends.base import Backend
from sojourn.repository.backends.opening import open_backend
from support.object_stores import S3Server, s3_options

KEY = "Dom.1/packs_x/ab-cd/0123.._-z"


def everything(backend: Backend) -> dict[str, Callable[[], Any]]:
    return {
        "put": lambda: backend.put(KEY, b"content"),
        "create": lambda: backend.put(KEY, b"content", create=True),
        "get": lambda: backend.get(KEY),
        "get_ranges": lambda: backend.get_ranges(KEY, [(1, 2), (5, 1)]),
        "get_tail": lambda: backend.get_tail(KEY, 3),
        "head": lambda: backend.head(KEY),
        "list": lambda: list(backend.list("Dom.1/")),
        "now": lambda: backend.now(),
        "delete": lambda: backend.delete([KEY]),
    }


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[str, dict[str, str]]]:
    """A bucket of a server that checks signatures, and the options of one who may use it."""
    with S3Server.running(free_requests=4) as server:
        user = server.make_user()
        yield f"s3://{server.make_bucket()}/prefix", {**s3_options(server.url), **user}


def test_every_request_is_signed_rightly(guarded: tuple[str, dict[str, str]]) -> None:
    url, options = guarded
    for call in everything(open_backend(url, options=options)).values():
        call()


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_refused_and_not_shown(
    guarded: tuple[str, dict[str, str]], wrong: str
) -> None:
    url, right = guarded
    options = {**right, wrong: "wrong-" + right[wrong]}
    for call in everything(open_backend(url, options=options)).values():
        with pytest.raises(StoreRefused) as refused:
            call()
        shown = "".join(traceback.format_exception(refused.value)) + str(refused.value.details)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert right[name] not in shown


def certify(
    directory: Path, name: str, issuer: tuple[x509.Certificate, Any] | None
) -> tuple[x509.Certificate, Any]:
    """Write `name`.pem and `name`.key: an authority's, or for the loopback address one of its."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([here]), False)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), True)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )
    (directory / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (directory / f"{name}.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return made, key


def test_a_certificate_must_come_from_a_trusted_authority(tmp_path: Path) -> None:
    certify(tmp_path, "server", certify(tmp_path, "authority", None))
    certificate = (tmp_path / "server.pem", tmp_path / "server.key")
    with S3Server.running(certificate=certificate) as server:
        url = f"s3://{server.make_bucket()}/prefix"
        options = s3_options(server.url)
        with pytest.raises(StoreRefused) as refused:
            open_backend(url, options=options).get("key")
        assert "certificate" in str(refused.value)
        trusting = {**options, "AWS_CA_BUNDLE": str(tmp_path / "authority.pem")}
        for call in everything(open_backend(url, options=trusting)).values():
            call()
    (tmp_path / "authority.pem").write_text("no certificate")
    with pytest.raises(StoreRefused):
        open_backend(url, options=trusting)
