"""What makes a data directory a node of a cluster: who it is, and what it was given when it joined.

Guarantee: `node.json` is readable by its owner alone and is either whole or not there; with it,
`sojourn node run` needs nothing else. The deployment's keys lie in the files in which a server of
one machine keeps its own, so that what reads them need not know of clusters.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from sojourn.errors import HostUnfit
from sojourn.server.cluster.pki import Credentials
from sojourn.store.copying import write_whole
from sojourn.wire.nodes import JoinAnswer

FILE = "node.json"
KEY_FILES = ("secrets.key", "e2b.key", "authority/ca.key", "authority/ca.pem")
"""The deployment's keys, as they lie in a data directory and are named in the cluster's values."""


class Identity(msgspec.Struct, frozen=True):
    """A node's own. `server` is where its certificate is renewed."""

    node: str
    name: str
    key: str
    certificate: str
    authority: str
    server: str
    database: str
    store: str | None
    store_key: bytes | None
    labels: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Identity({self.node})"

    @property
    def credentials(self) -> Credentials:
        """What it shows to servers, and by what it knows them."""
        return Credentials(
            self.key.encode("ascii"),
            self.certificate.encode("ascii"),
            self.authority.encode("ascii"),
        )


def read_identity(data: Path) -> Identity:
    """Raises HostUnfit when the directory is no node's."""
    path = data / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Identity)
    except FileNotFoundError:
        raise HostUnfit(
            f"{data} belongs to no node",
            next_step="Make a token with `sojourn node token`, then `sojourn node join`.",
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise HostUnfit(
            f"{path} cannot be read: {error}", next_step="Join again, with a new token."
        ) from error


def write_identity(data: Path, identity: Identity) -> None:
    """Keep it, in place of what was there."""
    write_whole(data / FILE, msgspec.json.encode(identity), 0o600)


def keep_joined(data: Path, answer: JoinAnswer, *, name: str, key: bytes, server: str) -> Identity:
    """Write down what a node was given; the identity last, so that a directory which has one is
    complete."""
    for file in KEY_FILES:
        path = data / file
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, answer.keys[file], 0o600)
    identity = Identity(
        node=answer.node,
        name=name,
        key=key.decode("ascii"),
        certificate=answer.certificate,
        authority=answer.authority,
        server=server,
        database=answer.database,
        store=answer.store,
        store_key=answer.store_key,
        labels=answer.labels,
    )
    write_identity(data, identity)
    return identity
