"""What the server and the gateway process tell each other, over one inherited socket.

Guarantee: both sides use these types, each frame is bounded, and a request is answered once.
Frames are those of `sojourn.repository.serving`'s shape: a length, then msgpack.
"""

from __future__ import annotations

import msgspec

from sojourn.errors import ErrorBody
from sojourn.model.network import Denial, Effect, NetworkPolicy, SecretUse

MAX_FRAME = 4 << 20  # more than the largest policy with as many secrets as it may name


class Start(msgspec.Struct, frozen=True, tag=True):
    """First, from the server. `authority` is the directory of the deployment's certificate
    authority. `namespace` is the path of a network namespace in which outside connections are made
    (None: the host's); `nameservers` are asked instead of the host's own; `private` are networks
    that policies may name although they are private. `roots` is a file of certificates that are
    trusted besides the system's own. `lease` is the path of the node's lease file, past whose
    deadline nothing is carried (None: there is no lease). `ports` is the inherited descriptor of
    the channel about exposed ports (`sojourn.gateway.ports_channel`); -1: there is none."""

    authority: str
    namespace: str | None = None
    nameservers: list[str] = []
    private: list[str] = []
    ports: int = -1
    roots: str | None = None
    lease: str | None = None


class Granted(msgspec.Struct, frozen=True):
    """A secret a session may use, with its value."""

    name: str
    uses: list[SecretUse]
    value: str

    def __repr__(self) -> str:
        return f"Granted({self.name!r})"


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Serve a sandbox: listen at `socket`, under this policy. Again with another policy: it holds
    from now on, and connections it no longer allows are reset."""

    sandbox: str
    session: str
    tenant: str
    epoch: int
    socket: str
    policy: NetworkPolicy
    secrets: list[Granted] = []


class Detach(msgspec.Struct, frozen=True, tag=True):
    """A sandbox is gone: close everything of it."""

    sandbox: str


class Began(msgspec.Struct, frozen=True, tag=True):
    """From the gateway: about to leave; it leaves when this is acknowledged."""

    effect: Effect


class Ended(msgspec.Struct, frozen=True, tag=True):
    """From the gateway: how it ended (also sent alone for what only read)."""

    effect: Effect


class Withheld(msgspec.Struct, frozen=True, tag=True):
    """From the gateway: what a policy did not let out, counted."""

    denial: Denial


class Answer(msgspec.Struct, frozen=True, tag=True):
    """To a request: empty is success."""

    error: ErrorBody | None = None


class Envelope(msgspec.Struct, frozen=True):
    """One message. `id` counts a side's own requests; an answer bears the id of what it answers,
    negated."""

    id: int
    body: Start | Attach | Detach | Began | Ended | Withheld | Answer
