"""Certificates of a cluster: who may speak to whom."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sojourn.errors import InvalidRequest, Unauthenticated
from sojourn.server.cluster import pki
from sojourn.server.cluster.pki import ClusterAuthority, Credentials

NODE, OTHER = "nod_000000000aaaaaaaaaaaaaaa", "nod_000000000bbbbbbbbbbbbbbb"


@pytest.fixture(scope="module")
def authority() -> ClusterAuthority:
    return ClusterAuthority.make()


def node_of(authority: ClusterAuthority, node: str) -> Credentials:
    key, request = pki.make_request()
    return Credentials(key, authority.sign_node(request, node), authority.certificate)


@contextmanager
def listening(context: ssl.SSLContext) -> Iterator[int]:
    """A TLS server that answers one byte with one, in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) as secure:
                    secure.sendall(secure.recv(1) or b"")
            except OSError:
                plain.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def ask(port: int, context: ssl.SSLContext, host: str) -> bytes:
    """One byte there and back; in TLS 1.3 a refused certificate shows only when reading."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        with context.wrap_socket(plain, server_hostname=host) as secure:
            secure.sendall(b"x")
            return secure.recv(1)


def test_a_server_reaches_the_node_it_means(authority: ClusterAuthority) -> None:
    server = pki.upstream_context(authority.server_credentials("srv"))
    with listening(pki.node_context(node_of(authority, NODE))) as port:
        assert ask(port, server, pki.node_host(NODE)) == b"x"
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(port, server, pki.node_host(OTHER))
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(port, server, pki.SERVER_HOST)


def test_a_node_answers_to_servers_alone(authority: ClusterAuthority) -> None:
    node = node_of(authority, NODE)
    stranger = ClusterAuthority.make()
    with listening(pki.node_context(node)) as port:
        host = pki.node_host(NODE)
        for shown in (
            pki.pinned_context(authority.certificate),  # nothing is shown
            pki.upstream_context(node_of(authority, OTHER)),  # another node
            _trusting(stranger.server_credentials("srv"), authority),  # another cluster's server
        ):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                assert ask(port, shown, host) == b""
                raise ConnectionError("ended without an answer")


def _trusting(credentials: Credentials, authority: ClusterAuthority) -> ssl.SSLContext:
    return pki.upstream_context(
        Credentials(credentials.key, credentials.certificate, authority.certificate)
    )


def test_a_node_cannot_pose_as_the_server_that_others_join_at(authority: ClusterAuthority) -> None:
    joins = pki.pinned_context(authority.certificate)
    with listening(pki.joining_context(authority.server_credentials("srv"))) as port:
        assert ask(port, joins, pki.SERVER_HOST) == b"x"
    with listening(pki.joining_context(node_of(authority, NODE))) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(port, joins, pki.SERVER_HOST)


def test_whoever_pins_one_authority_takes_no_other(authority: ClusterAuthority) -> None:
    other = ClusterAuthority.make()
    assert other.fingerprint != authority.fingerprint
    with listening(pki.joining_context(other.server_credentials("srv"))) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(port, pki.pinned_context(authority.certificate), pki.SERVER_HOST)


def test_an_authority_comes_back_whole(authority: ClusterAuthority) -> None:
    again = ClusterAuthority.load(authority.dump())
    assert again.fingerprint == authority.fingerprint == pki.fingerprint(authority.certificate)
    server = pki.upstream_context(again.server_credentials("srv"))
    with listening(pki.node_context(node_of(authority, NODE))) as port:
        assert ask(port, server, pki.node_host(NODE)) == b"x"
    with pytest.raises(ValueError):
        ClusterAuthority.load(authority.dump().replace(authority.certificate, b"") + b"x")
    mixed = authority.dump().replace(authority.certificate, ClusterAuthority.make().certificate)
    with pytest.raises(ValueError):
        ClusterAuthority.load(mixed)


@pytest.mark.parametrize("text", [b"", b"x", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n"])
def test_what_is_no_request_is_refused(authority: ClusterAuthority, text: bytes) -> None:
    with pytest.raises(InvalidRequest):
        authority.sign_node(text, NODE)


def test_a_changed_request_is_refused(authority: ClusterAuthority) -> None:
    _, request = pki.make_request()
    lines = request.splitlines()
    middle = bytearray(lines[2])
    middle[4] = ord("B") if middle[4] == ord("A") else ord("A")
    lines[2] = bytes(middle)
    with pytest.raises(InvalidRequest):
        authority.sign_node(b"\n".join(lines) + b"\n", NODE)


def test_a_node_renews_its_certificate_with_its_key(authority: ClusterAuthority) -> None:
    node = node_of(authority, NODE)
    key, request = pki.make_request()
    signature = pki.sign_renewal(node.key, request)
    id, certificate = authority.renew_node(node.certificate, request, signature)
    assert id == NODE
    renewed = Credentials(key, certificate, authority.certificate)
    server = pki.upstream_context(authority.server_credentials("srv"))
    with listening(pki.node_context(renewed)) as port:
        assert ask(port, server, pki.node_host(NODE)) == b"x"
    assert pki.days_left(certificate) > pki.RENEW_NODE_DAYS


def test_nobody_else_renews_it(authority: ClusterAuthority) -> None:
    node, other = node_of(authority, NODE), node_of(authority, OTHER)
    _, request = pki.make_request()
    _, another = pki.make_request()
    stranger = node_of(ClusterAuthority.make(), NODE)
    server = authority.server_credentials("srv")
    for certificate, sent, signature in (
        (node.certificate, request, pki.sign_renewal(other.key, request)),
        (node.certificate, another, pki.sign_renewal(node.key, request)),
        (stranger.certificate, request, pki.sign_renewal(stranger.key, request)),
        (server.certificate, request, pki.sign_renewal(server.key, request)),
        (authority.certificate, request, pki.sign_renewal(node.key, request)),
        (b"nothing", request, pki.sign_renewal(node.key, request)),
        (node.certificate, request, b""),
    ):
        with pytest.raises(Unauthenticated):
            authority.renew_node(certificate, sent, signature)


def test_a_running_context_shows_new_credentials(authority: ClusterAuthority) -> None:
    context = pki.joining_context(authority.server_credentials("srv"))
    joins = pki.pinned_context(authority.certificate)
    with listening(context) as port:
        before = _shown(port, joins)
        pki.load_credentials(context, authority.server_credentials("srv"))
        assert _shown(port, joins) != before


def _shown(port: int, context: ssl.SSLContext) -> bytes | None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        with context.wrap_socket(plain, server_hostname=pki.SERVER_HOST) as secure:
            return secure.getpeercert(binary_form=True)


def test_keys_are_not_shown(authority: ClusterAuthority) -> None:
    credentials = authority.server_credentials("srv")
    for one in (authority, credentials):
        assert "PRIVATE" not in repr(one) and "BEGIN" not in repr(one)
