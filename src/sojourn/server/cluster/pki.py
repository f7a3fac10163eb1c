"""The cluster's own certificate authority, and who may speak to whom.

Guarantee: a node answers only to a certificate of a server, and a server speaks only to the very
node it means: a node's certificate holds a name made of its id and serves alone (it opens no other
node), a server's connects and holds the one name that joining nodes look for. Keys of nodes are
made by nodes and never leave them. What proves the authority to a node that joins is its
fingerprint, which comes with the token.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from sojourn.errors import InvalidRequest, Unauthenticated
from sojourn.gateway.authority import key_pem, key_usage

SERVER_HOST = "server.sojourn"
"""The name that every server's certificate holds."""
HTTP_PROTOCOL = "http/1.1"
TUNNEL_PROTOCOL = "sojourn-tunnel/1"
"""What a connection to a node carries (ALPN): requests, or the bytes of an exposed port."""

_AUTHORITY_DAYS = 3650
_NODE_DAYS = 365
_SERVER_HOURS = 48
RENEW_SERVER_SECONDS = _SERVER_HOURS * 3600 / 4
RENEW_NODE_DAYS = 60
"""A node renews its certificate when it has fewer days left."""
_BAD_CERTIFICATE = (
    ValueError,
    TypeError,
    IndexError,
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.ExtensionNotFound,
)
# Clocks of machines differ.
_BACKDATED = datetime.timedelta(hours=1)


def node_host(node: str) -> str:
    """The name in a node's certificate."""
    return f"{node.replace('_', '-').lower()}.node.sojourn"


class Credentials(msgspec.Struct, frozen=True):
    """What one side of a connection shows and trusts; all PEM."""

    key: bytes
    certificate: bytes
    authority: bytes

    def __repr__(self) -> str:
        return "Credentials()"


class ClusterAuthority:
    """Signs the certificates of servers and nodes."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    def __repr__(self) -> str:
        return f"ClusterAuthority({self.fingerprint[:16]})"

    @classmethod
    def make(cls) -> ClusterAuthority:
        """A new one."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"Sojourn cluster {os.urandom(4).hex()}")
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATED)
            .not_valid_after(now + datetime.timedelta(days=_AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(key_usage(signs=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @classmethod
    def load(cls, pem: bytes) -> ClusterAuthority:
        """What `dump` gave. Raises ValueError."""
        key = serialization.load_pem_private_key(pem, password=None)
        certificate = x509.load_pem_x509_certificate(pem)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or (
            certificate.public_key() != key.public_key()
        ):
            raise ValueError("this is no authority: key and certificate do not belong together")
        return cls(key, certificate)

    def dump(self) -> bytes:
        """Key and certificate, for whoever seals them."""
        return key_pem(self._key) + self.certificate

    @property
    def certificate(self) -> bytes:
        """Its certificate (PEM)."""
        return _pem(self._certificate)

    @property
    def fingerprint(self) -> str:
        """See `fingerprint`."""
        return fingerprint(self.certificate)

    def server_credentials(self, name: str) -> Credentials:
        """New credentials of a server."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(
            key.public_key(),
            name,
            [SERVER_HOST],
            [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH],
            datetime.timedelta(hours=_SERVER_HOURS),
        )
        return Credentials(key_pem(key), _pem(certificate), self.certificate)

    def sign_node(self, request: bytes, node: str) -> bytes:
        """The certificate of a node that sends this signing request; of the request nothing but
        its key is believed. Raises InvalidRequest."""
        return _pem(
            self._sign(
                _key_of(request),
                node,
                [node_host(node)],
                # Only to serve: with it nobody connects to another node.
                [ExtendedKeyUsageOID.SERVER_AUTH],
                datetime.timedelta(days=_NODE_DAYS),
            )
        )

    def renew_node(self, certificate: bytes, request: bytes, signature: bytes) -> tuple[str, bytes]:
        """The id of the node whose certificate this is, and its next one, for whoever has the
        certificate's key: `signature` is made with it over the request. Raises Unauthenticated,
        InvalidRequest."""
        try:
            known = x509.load_pem_x509_certificate(certificate)
            known.verify_directly_issued_by(self._certificate)
            key = known.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError("a key of another kind")
            key.verify(signature, _renewal(request), ec.ECDSA(hashes.SHA256()))
            node = str(known.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
            names = known.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            if node_host(node) not in names.get_values_for_type(x509.DNSName):
                raise ValueError("the certificate of no node")
            if known.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
                raise ValueError("a certificate that has ended")
        except _BAD_CERTIFICATE as error:
            raise Unauthenticated(
                f"the certificate cannot be renewed: {str(error) or 'the signature is wrong'}",
                next_step="Join the node again with a new token (`sojourn node token`).",
            ) from error
        return node, self.sign_node(request, node)

    def _sign(
        self,
        key: ec.EllipticCurvePublicKey,
        name: str,
        hosts: list[str],
        uses: list[ObjectIdentifier],
        lasts: datetime.timedelta,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(max(now - _BACKDATED, self._certificate.not_valid_before_utc))
            .not_valid_after(min(now + lasts, self._certificate.not_valid_after_utc))
            .add_extension(
                x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=True)
            .add_extension(key_usage(signs=False), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a certificate (PEM), in hexadecimal digits. Raises ValueError."""
    found = x509.load_pem_x509_certificate(certificate)
    return hashlib.sha256(found.public_bytes(serialization.Encoding.DER)).hexdigest()


# -- a node's side ------------------------------------------------------------------------------


def make_request() -> tuple[bytes, bytes]:
    """A new key, and the signing request for it (PEM)."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_name("sojourn node"))
        .sign(key, hashes.SHA256())
    )
    return key_pem(key), request.public_bytes(serialization.Encoding.PEM)


def sign_renewal(key: bytes, request: bytes) -> bytes:
    """What shows that whoever sends `request` has the key of the certificate of before."""
    found = serialization.load_pem_private_key(key, password=None)
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ValueError("a key of another kind")
    return found.sign(_renewal(request), ec.ECDSA(hashes.SHA256()))


def days_left(certificate: bytes) -> float:
    """Days until a certificate (PEM) ends."""
    end = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    return (end - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400


# -- TLS ----------------------------------------------------------------------------------------


def node_context(credentials: Credentials) -> ssl.SSLContext:
    """For a node, which serves servers alone."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([TUNNEL_PROTOCOL, HTTP_PROTOCOL])
    return context


def joining_context(credentials: Credentials) -> ssl.SSLContext:
    """For a server, at the address where nodes join."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
    context.set_alpn_protocols([HTTP_PROTOCOL])
    return context


def upstream_context(credentials: Credentials, protocol: str = HTTP_PROTOCOL) -> ssl.SSLContext:
    """For a server that connects to nodes; the name of the node goes with each connection."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, credentials)
    context.set_alpn_protocols([protocol])
    return context


def pinned_context(authority: bytes) -> ssl.SSLContext:
    """For a node that joins: only servers under this authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority.decode("ascii"))
    return context


def load_credentials(context: ssl.SSLContext, credentials: Credentials) -> None:
    """Have a context show these from its next connection on."""
    with _in_memory(credentials) as path:
        context.load_cert_chain(path)


def _context(kind: int, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=credentials.authority.decode("ascii"))
    load_credentials(context, credentials)
    return context


@contextlib.contextmanager
def _in_memory(credentials: Credentials) -> Iterator[Path]:
    # The module takes keys from files only; this one is in memory.
    memory = os.memfd_create("credentials", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(credentials.key + credentials.certificate)
        yield Path(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)


# -- pieces -------------------------------------------------------------------------------------


def _renewal(request: bytes) -> bytes:
    return b"sojourn renewal of a node's certificate\n" + request


def _key_of(request: bytes) -> ec.EllipticCurvePublicKey:
    try:
        found = x509.load_pem_x509_csr(request)
        key = found.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(
            key.curve, ec.SECP256R1
        ):
            raise ValueError("a key of another kind than P-256")
        if not found.is_signature_valid:
            raise ValueError("whoever made it does not have its key")
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidRequest(f"the signing request is not valid: {error}", field="request") from (
            error
        )
    return key


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
