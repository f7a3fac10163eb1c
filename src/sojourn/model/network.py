"""What a session may reach, and what left it.

Guarantee: the default reaches nothing. A policy is a value: it goes with the session through
pause, suspension, move and fork, and is checked when it is set, not when it is used.
"""

from __future__ import annotations

import enum

import msgspec


class NetworkMode(enum.StrEnum):
    """How far a session's network reaches."""

    NONE = "none"  # the loopback only
    ALLOWLIST = "allowlist"  # what a rule names
    OPEN = "open"  # every public address; never the host, private ranges or metadata services


class NetworkRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rule of an allowlist lets through; its name is told in refusals and records.

    `domains` are names (`example.com`) or all names below one (`*.example.com`); they are resolved
    outside, and only public addresses are taken. `cidrs` are IPv4 or IPv6 networks, for programs
    that use addresses; private ones count only where the operator lets policies name them.
    `ports` empty means 80 and 443 for domains and any port for networks. `inspect` opens TLS with
    the deployment's own authority, so that requests are on record, their hosts are checked and
    secrets can be put in; without it TLS is passed through by the name in its greeting.
    """

    name: str
    domains: list[str] = []
    cidrs: list[str] = []
    ports: list[int] = []
    inspect: bool = True


class OnEffects(enum.StrEnum):
    """What a rollback or fork does about requests that cannot be taken back."""

    LIST = "list"
    REFUSE = "refuse"


class NetworkPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network of a session. Bounds: 0 means none is set.

    `connections` at a time, `requests_per_minute`, and `bytes_per_second` in each direction.
    `secrets` names the tenant's secrets that are put into its requests; a fork gets them only with
    `secrets_in_forks`. `on_effects` says whether a rollback or fork to a point before requests that
    cannot be taken back is done and they are listed, or it is refused.
    """

    mode: NetworkMode = NetworkMode.NONE
    rules: list[NetworkRule] = []
    secrets: list[str] = []
    secrets_in_forks: bool = False
    on_effects: OnEffects = OnEffects.LIST
    connections: int = 256
    requests_per_minute: int = 0
    bytes_per_second: int = 0


class SecretPlace(enum.StrEnum):
    """Where a secret is put into a request."""

    HEADER = "header"  # `name: prefix + value`
    QUERY = "query"  # `?name=value`
    BASIC = "basic"  # Authorization: Basic, with `name` as the user
    TEMPLATE = "template"  # header `name` with `template`, in which {secret} stands for the value


class SecretUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For which domains and how a secret is used. Domains are written as in rules.

    In a header named Authorization the value stands in `template`, in any other one alone; place
    `template` uses the template with every name. It is sent over TLS only, unless `over_http`.
    """

    domains: list[str]
    place: SecretPlace = SecretPlace.HEADER
    name: str = "Authorization"
    template: str = "Bearer {secret}"
    over_http: bool = False


def placeholder(secret: str) -> str:
    """What stands for a secret inside a session; the gateway replaces it on the way out, in
    headers and queries to the secret's own domains, and puts it in place of the value on the way
    in."""
    return f"sojourn-secret-{secret}"


class Effect(msgspec.Struct, frozen=True):
    """A request or connection that left a session. Times are seconds since 1970 (UTC).

    `kind` is http, websocket, tls (passed through) or tcp. `path` is without the query, which may
    hold what nobody should keep. `idempotent` as RFC 9110 section 9.2.2 has it; connections whose
    content is not seen are not. `status` None: no answer came. `outcome` is open, done, failed or
    interrupted. Bytes are those of the bodies, or of the connection.
    """

    id: str
    session: str
    sandbox: str
    epoch: int
    kind: str
    method: str
    scheme: str
    host: str
    port: int
    path: str
    idempotent: bool
    rule: str
    secrets: list[str]
    began_at: float
    ended_at: float | None = None
    status: int | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    outcome: str = "open"


class Denial(msgspec.Struct, frozen=True):
    """What a session's policy did not let out: `count` times from `first_at` to `last_at`.

    `rule` is what decided (`no-rule`, `port`, `private-address`, ...), `reason` says it in words.
    `host` is as the program named it; empty: different ones, more than are told one by one.
    """

    session: str
    sandbox: str
    epoch: int
    host: str
    port: int
    rule: str
    reason: str
    count: int
    first_at: float
    last_at: float


# Methods that only read (RFC 9110, section 9.2.1).
_READING = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


def lasting(effect: Effect) -> bool:
    """Whether something may have been done outside that no rollback takes back: by all but requests
    that only read. That a request may be repeated (PUT, DELETE) takes nothing back."""
    return not (effect.kind == "http" and effect.method.upper() in _READING)
