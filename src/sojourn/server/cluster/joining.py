"""How a machine becomes a node.

Guarantee: a token lets one machine join, once, within an hour; the database knows only its digest.
Nothing secret is sent before the other side was proven: a node asks for the authority's
certificate, compares it with the fingerprint in its token, and from then on speaks only to a server
under it. Of the signing request nothing is believed but its key.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpcore
import msgspec

from sojourn.database.base import Database
from sojourn.errors import (
    ErrorBody,
    HostUnfit,
    InvalidRequest,
    NameTaken,
    NodeNotFound,
    NotFound,
    Unauthenticated,
    Unreachable,
    from_body,
)
from sojourn.model.ids import new_id
from sojourn.server.cluster import pki
from sojourn.server.cluster.identity import FILE, Identity, keep_joined, write_identity
from sojourn.server.cluster.values import ClusterValues
from sojourn.wire.nodes import (
    AuthorityInfo,
    JoinAnswer,
    JoinRequest,
    NodeTokenInfo,
    RenewAnswer,
    RenewRequest,
)

T = TypeVar("T")

TOKEN_SECONDS = 3600.0
_PREFIX = "sojourn-join"
_SECONDS = 30.0
_MOST_BYTES = 1 << 20
MAX_NAME = 63


class Token(msgspec.Struct, frozen=True):
    """What a token holds."""

    id: str
    secret: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{_PREFIX}.{self.id}.{self.secret}.{self.fingerprint}"

    def __repr__(self) -> str:
        return f"Token({self.id})"

    @property
    def digest(self) -> str:
        """What the database knows of it."""
        return hashlib.sha256(self.secret.encode()).hexdigest()


def parse_token(text: str) -> Token:
    """Raises Unauthenticated."""
    parts = text.strip().split(".")
    if len(parts) != 4 or parts[0] != _PREFIX or not text.isascii() or not all(parts):
        raise Unauthenticated(
            "this is no token for a node", next_step="Make one with `sojourn node token`."
        )
    return Token(*parts[1:])


class Joining:
    """A server's side. `database_url` and `store` are given to nodes as the server has them."""

    def __init__(
        self,
        database: Database,
        values: ClusterValues,
        *,
        database_url: str,
        store: str,
        store_key: bytes | None,
        url: str,
    ) -> None:
        self._database = database
        self._values = values
        self._database_url = database_url
        self._store = store
        self._store_key = store_key
        self._url = url

    def authority(self) -> AuthorityInfo:
        """What a token's fingerprint proves."""
        return AuthorityInfo(self._values.authority.certificate.decode("ascii"))

    async def make_token(self, labels: Mapping[str, str]) -> NodeTokenInfo:
        """A new token."""
        token = Token(new_id("jtk"), secrets.token_urlsafe(32), self._values.authority.fingerprint)
        expires = time.time() + TOKEN_SECONDS
        await self._database.add_node_token(
            token.id, token.digest, expires_at=expires, labels=dict(labels)
        )
        return NodeTokenInfo(token.id, str(token), expires, self._url)

    async def join(self, request: JoinRequest) -> JoinAnswer:
        """Take a machine in. Raises Unauthenticated, InvalidRequest, NameTaken."""
        check_node_name(request.name)
        token = parse_token(request.token)
        node = new_id("nod")
        # What cannot be done leaves the token as it is.
        certificate = self._values.authority.sign_node(request.request.encode(), node)
        if any(known.name == request.name for known in await self._database.list_nodes()):
            raise NameTaken(
                f"another node is named {request.name!r}",
                next_step="Choose another name (--name), or remove that node (`sojourn node rm"
                " NODE`).",
                name=request.name,
            )
        labels = await self._database.use_node_token(token.id, token.digest)
        await self._database.add_node(node, request.name, labels=labels)
        return JoinAnswer(
            node=node,
            certificate=certificate.decode("ascii"),
            authority=self._values.authority.certificate.decode("ascii"),
            database=self._database_url,
            store=self._store,
            store_key=self._store_key,
            keys=self._values.keys,
            labels=labels,
        )

    async def renew(self, request: RenewRequest) -> RenewAnswer:
        """The next certificate of a node that is still one. Raises Unauthenticated."""
        node, certificate = self._values.authority.renew_node(
            request.certificate.encode(), request.request.encode(), request.signature
        )
        try:
            await self._database.get_node(node)
        except NodeNotFound:
            raise Unauthenticated("this node was removed from the cluster") from None
        return RenewAnswer(certificate.decode("ascii"))


def check_node_name(name: str) -> str:
    """Raises InvalidRequest."""
    plain = name.replace("-", "").replace(".", "")
    begins = name[:1].isalnum()  # not as an option of a command does
    if not begins or len(name) > MAX_NAME or not plain.isascii() or not plain.isalnum():
        raise InvalidRequest(
            f"{name!r} is no name of a node: letters, digits, `-` and `.`, at most {MAX_NAME},"
            " a letter or digit first",
            field="name",
        )
    return name


# -- a node's side ------------------------------------------------------------------------------


def join(data: Path, server: str, token: str, name: str) -> Identity:
    """Make a data directory that of a new node. Blocks.

    Raises Unauthenticated (the token; the server is another one), Unreachable, HostUnfit (it is a
    node's already), InvalidRequest, NameTaken."""
    told = parse_token(token)
    check_node_name(name)
    if (data / FILE).exists() or (data / "sojourn.db").exists():
        raise HostUnfit(
            f"{data} is in use already",
            next_step="Give a new directory (--data); one belongs to one node, or to one server.",
        )
    server = _https(server)
    unproven = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unproven.check_hostname = False
    unproven.verify_mode = ssl.CERT_NONE
    found = _ask(server, unproven, b"GET", "/v1/nodes/authority", None, AuthorityInfo)
    try:
        shown = pki.fingerprint(found.authority.encode())
    except ValueError:
        shown = ""
    if not secrets.compare_digest(shown, told.fingerprint):
        raise Unauthenticated(
            f"the server at {server} is not of the cluster this token is for",
            next_step="Check the address; make a token with `sojourn node token`.",
        )
    proven = pki.pinned_context(found.authority.encode())
    key, request = pki.make_request()
    asked = JoinRequest(token=str(told), name=name, request=request.decode("ascii"))
    answer = _ask(server, proven, b"POST", "/v1/nodes/join", asked, JoinAnswer)
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    return keep_joined(data, answer, name=name, key=key, server=server)


async def renewed(data: Path, identity: Identity) -> Identity:
    """The identity, with its next certificate where the one it has ends soon. Raises
    Unauthenticated (it was removed), Unreachable (tried again later)."""
    if pki.days_left(identity.certificate.encode()) > pki.RENEW_NODE_DAYS:
        return identity
    return await asyncio.to_thread(_renew, data, identity)


def _renew(data: Path, identity: Identity) -> Identity:
    key, request = pki.make_request()
    asked = RenewRequest(
        certificate=identity.certificate,
        request=request.decode("ascii"),
        signature=pki.sign_renewal(identity.key.encode(), request),
    )
    proven = pki.pinned_context(identity.authority.encode())
    answer = _ask(identity.server, proven, b"POST", "/v1/nodes/renew", asked, RenewAnswer)
    fresh = msgspec.structs.replace(
        identity, key=key.decode("ascii"), certificate=answer.certificate
    )
    write_identity(data, fresh)
    return fresh


def _https(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"https://{url}")
    if parts.scheme != "https" or not parts.hostname or not parts.port:
        raise InvalidRequest(
            f"{url!r} is no address to join at",
            next_step="Give https://HOST:PORT, as `sojourn node token` shows it.",
            field="server",
        )
    return f"https://{parts.netloc}"


def _ask(
    server: str, context: ssl.SSLContext, method: bytes, path: str, value: Any, kind: type[T]
) -> T:
    """One request over TLS, to a server that shows the name of servers."""
    body = b"" if value is None else msgspec.json.encode(value)
    extensions = {
        "sni_hostname": pki.SERVER_HOST,
        "timeout": {"connect": _SECONDS, "read": _SECONDS, "write": _SECONDS},
    }
    try:
        with (
            httpcore.ConnectionPool(ssl_context=context) as pool,
            pool.stream(
                method,
                f"{server}{path}",
                headers={"content-type": "application/json"},
                content=body,
                extensions=extensions,
            ) as answer,
        ):
            content = bytearray()
            for piece in answer.iter_stream():
                content += piece
                if len(content) > _MOST_BYTES:  # whoever answers may not be proven yet
                    raise Unreachable(f"{server} answers what no server answers")
    except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
        if "certificate" in str(error).lower():
            raise Unauthenticated(
                f"the server at {server} is not of this cluster: {error}",
                next_step="Check the address.",
            ) from error
        raise Unreachable(
            f"the server at {server} does not answer: {error}",
            next_step="Check the address: it is the one of `--nodes-listen`.",
        ) from error
    try:
        if answer.status >= 400:
            raise from_body(msgspec.json.decode(content, type=ErrorBody))
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise NotFound(
            f"{server}{path} answers {answer.status}, which is no server of a cluster",
            next_step="Check the address: it is the one of `--nodes-listen`.",
        ) from error
