"""What a request is about, by its method, path and headers; pure.

Guarantee: every request is of exactly one kind, and nothing is asked of a session's holder that is
another session's. Only what is known to be for clients is passed on at all: a node believes whoever
asks, because that is a server. Which node answers follows from the kind; whether the caller may ask
is decided before, by `Wanted.shows`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

import msgspec

from sojourn.server.e2b import ids

_E2B_API = re.compile(
    r"(?:/v[23])?/(?:sandboxes|templates|volumes|secrets|teams|nodes|access-tokens|api-keys)"
    r"(?:/.*)?|/snapshots"
)
_E2B_BOX = re.compile(r"(?:/v2)?/sandboxes/(?P<sandbox>[^/]+)(?:/.*)?")
_E2B_CREATE = re.compile(r"(?:/v2)?/sandboxes")
_E2B_CODE = re.compile(r"/execute|/contexts(?:/.*)?")
_E2B_RPC = re.compile(r"/(?:process\.Process|filesystem\.Filesystem)/\w+")
_HOST = re.compile(rb"\d{1,5}-(ses-[0-9a-z]{24})\.")
_OWN = ("/v1/nodes", "/v1/status", "/v1/health", "/v1/openapi.json")
_WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class Kind(enum.Enum):
    """Who answers a request."""

    OWN = "the server itself"
    SESSION = "the node that holds a session"
    OPERATION = "the node that runs an operation"
    PLACE = "a node that has room for a session"
    ANY = "any node"


class Style(enum.Enum):
    """Who asks, and so how a failure is told."""

    API = "the API's clients"
    E2B_API = "E2B's clients, of the control plane"
    E2B_FILES = "E2B's clients, of files and code"
    E2B_RPC = "E2B's clients, of commands"


class Shared(enum.Enum):
    """What of the deployment's a request changes, which other nodes or servers remember."""

    SECRETS = "secrets"
    TEMPLATES = "templates"
    TOKENS = "tokens"
    PORTS = "ports"


class Wanted(msgspec.Struct, frozen=True):
    """`ref` is the session's id or name, or the operation's id. `shows` is the header that holds
    the caller's token; None: what opens it is the node's to check."""

    kind: Kind
    style: Style
    ref: str | None = None
    shows: bytes | None = None
    changes: Shared | None = None


def classify(method: str, path: str, headers: Mapping[bytes, bytes]) -> Wanted:
    """What a request is about; names of headers are in lower case."""
    if path == "/v1" or path.startswith("/v1/"):
        return _api(method, path)
    if (found := _E2B_BOX.fullmatch(path)) is not None:
        session = ids.session_id(found["sandbox"])
        kind = Kind.ANY if session is None else Kind.SESSION
        return Wanted(kind, Style.E2B_API, session, b"x-api-key")
    if _E2B_API.fullmatch(path) is not None:
        creates = method == "POST" and _E2B_CREATE.fullmatch(path) is not None
        changes = Shared.TEMPLATES if method in _WRITES and path.startswith("/templates/") else None
        return Wanted(
            Kind.PLACE if creates else Kind.ANY, Style.E2B_API, None, b"x-api-key", changes
        )
    style = None
    if path in ("/health", "/files") or _E2B_CODE.fullmatch(path) is not None:
        style = Style.E2B_FILES
    elif _E2B_RPC.fullmatch(path) is not None:
        style = Style.E2B_RPC
    if style is None:
        # Also what nodes answer to servers alone (/node/...): nothing goes on that is not known.
        return Wanted(Kind.OWN, Style.API)
    session = _sandbox(headers)
    return Wanted(Kind.ANY if session is None else Kind.SESSION, style, session)


def _api(method: str, path: str) -> Wanted:
    if any(path == own or path.startswith(f"{own}/") for own in _OWN):
        return Wanted(Kind.OWN, Style.API)
    show = b"authorization"
    parts = path.split("/")[2:]
    match parts:
        case ["sessions"] | ["import"] if method == "POST":
            return Wanted(Kind.PLACE, Style.API, None, show)
        case ["sessions", ref, *rest] if ref:
            changes = Shared.TEMPLATES if rest == ["template"] else None
            if rest[:1] == ["ports"] and method in _WRITES:
                changes = Shared.PORTS
            return Wanted(Kind.SESSION, Style.API, ref, show, changes)
        case ["operations", operation] if operation:
            return Wanted(Kind.OPERATION, Style.API, operation, show)
        case ["tokens", *_] if method == "DELETE":
            return Wanted(Kind.ANY, Style.API, None, show, Shared.TOKENS)
        case ["secrets" | "templates" as what, *_] if method in _WRITES:
            return Wanted(Kind.ANY, Style.API, None, show, Shared(what))
    return Wanted(Kind.ANY, Style.API, None, show)


def _sandbox(headers: Mapping[bytes, bytes]) -> str | None:
    """The session a request for a sandbox's agent is about, by its header, else by its host."""
    name = headers.get(b"e2b-sandbox-id")
    if name is None:
        found = _HOST.match(headers.get(b"host", b""))
        name = None if found is None else found[1]
    return None if name is None else ids.session_id(name.decode("latin-1"))
