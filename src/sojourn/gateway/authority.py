"""The deployment's certificate authority, and certificates under it.

Guarantee: the key never leaves its file and this process, and the file is readable by its owner
alone. The authority is made once for a deployment; when it is renewed the key stays, so a sandbox
that trusts the certificate from before trusts what is signed after.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import os
import secrets
import ssl
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sojourn.store.copying import write_whole

CERTIFICATE = "ca.pem"
KEY = "ca.key"
_DAYS = 3650
_RENEW_DAYS = 365
_LEAF_DAYS = 30
_LEAF_RENEW_DAYS = 7
# The clock inside a sandbox may be behind by as long as it slept, for a moment.
_BACKDATED = datetime.timedelta(days=2)
_MOST_LEAVES = 1024


class Authority:
    """Signs certificates for hosts that are inspected."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: OrderedDict[str, tuple[datetime.datetime, ssl.SSLContext]] = OrderedDict()

    @property
    def pem(self) -> bytes:
        """The certificate that sandboxes trust."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def context(self, host: str) -> ssl.SSLContext:
        """For serving TLS as a host (a name or an address)."""
        now = datetime.datetime.now(datetime.UTC)
        found = self._contexts.get(host)
        if found is not None and found[0] > now:
            self._contexts.move_to_end(host)
            return found[1]
        context = self._make_context(self._sign(host, now))
        renew = now + datetime.timedelta(days=_LEAF_DAYS - _LEAF_RENEW_DAYS)
        self._contexts[host] = (renew, context)
        self._contexts.move_to_end(host)
        while len(self._contexts) > _MOST_LEAVES:
            self._contexts.popitem(last=False)
        return context

    def _make_context(self, leaf: x509.Certificate) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        # The module takes keys from files only: this one is in memory.
        memory = os.memfd_create("leaf", os.MFD_CLOEXEC)
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(key_pem(self._leaf_key))
                file.write(leaf.public_bytes(serialization.Encoding.PEM))
                file.write(self.pem)
            context.load_cert_chain(f"/proc/self/fd/{memory}")
        finally:
            os.close(memory)
        return context

    def _sign(self, host: str, now: datetime.datetime) -> x509.Certificate:
        try:
            name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            name = x509.DNSName(host)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])]))
            .issuer_name(self._certificate.subject)
            .public_key(self._leaf_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(max(now - _BACKDATED, self._certificate.not_valid_before_utc))
            .not_valid_after(now + datetime.timedelta(days=_LEAF_DAYS))
            .add_extension(x509.SubjectAlternativeName([name]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(key_usage(signs=False), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )


def open_authority(directory: Path) -> Authority:
    """The authority kept in a directory; made when there is none, renewed a year before it ends.
    Any number of processes may do so at a time."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(directory):
        key = _key(directory / KEY)
        path = directory / CERTIFICATE
        certificate = _read_certificate(path, key)
        if certificate is None:
            certificate = _make(key, _subject())
            write_whole(path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        elif _ends_soon(certificate):
            certificate = _make(key, certificate.subject)
            write_whole(path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return Authority(key, certificate)


def trusted(directory: Path) -> bytes:
    """What sandboxes are to trust. It does not take a gateway process: where none has run yet the
    authority is made now. Raises OSError, ValueError."""
    try:
        return (directory / CERTIFICATE).read_bytes()
    except FileNotFoundError:
        return open_authority(directory).pem


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        pem = path.read_bytes()
    except FileNotFoundError:
        key = ec.generate_private_key(ec.SECP256R1())
        write_whole(path, key_pem(key), 0o600)
        return key
    found = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} is no key of this authority")
    return found


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as it is written, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _read_certificate(path: Path, key: ec.EllipticCurvePrivateKey) -> x509.Certificate | None:
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        return None
    return found if found.public_key() == key.public_key() else None


def _ends_soon(certificate: x509.Certificate) -> bool:
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return left < datetime.timedelta(days=_RENEW_DAYS)


def _subject() -> x509.Name:
    name = f"Sojourn session network {secrets.token_hex(4)}"
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _make(key: ec.EllipticCurvePrivateKey, subject: x509.Name) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def key_usage(*, signs: bool) -> x509.KeyUsage:
    """What a certificate's key is for: signing certificates, or proving whose it is."""
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
