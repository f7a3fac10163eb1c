"""What all servers and nodes of a cluster share: its authority and the deployment's keys.

Guarantee: they are made once, by the first server, whichever of several that is; the database holds
them sealed with the cluster key, so that a copy of it opens nothing, and with another key a server
does not start instead of making a second cluster.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from sojourn.database.base import Database
from sojourn.errors import SecretsKeyInvalid
from sojourn.gateway.authority import CERTIFICATE, KEY, open_authority
from sojourn.server.cluster.pki import ClusterAuthority
from sojourn.server.secret_store import SecretStore

_KIND = "cluster value"
_AUTHORITY = "authority"
_EGRESS = "egress"
_SECRETS = "secrets.key"
_E2B = "e2b.key"


class ClusterValues(msgspec.Struct, frozen=True):
    """Opened. `keys` are the deployment's, by the file each lies in on a node."""

    authority: ClusterAuthority
    keys: dict[str, bytes]

    def __repr__(self) -> str:
        return "ClusterValues()"

    @property
    def secrets(self) -> SecretStore:
        """What seals tenants' secrets and the tokens of ports."""
        return SecretStore(bytes.fromhex(self.keys[_SECRETS].decode().strip()))

    @property
    def e2b(self) -> bytes:
        """What tokens of sandboxes are made of."""
        return self.keys[_E2B]


async def open_values(database: Database, key: bytes) -> ClusterValues:
    """The cluster's values, made where they are not there yet. Raises SecretsKeyInvalid when the
    cluster key is another one."""
    store = SecretStore(key)

    async def value(name: str, make: Callable[[], bytes]) -> bytes:
        sealed = await database.cluster_value(name)
        if sealed is None:
            made = await asyncio.to_thread(make)
            # Another server may have been first: what is kept counts.
            sealed = await database.put_cluster_value(name, store.seal(made, _KIND, name))
        try:
            return store.open(sealed, _KIND, name)
        except SecretsKeyInvalid as error:
            raise SecretsKeyInvalid(
                f"the database belongs to a cluster with another key: {error.message}",
                next_step="Give the key the cluster was made with (SOJOURN_CLUSTER_KEY_FILE).",
            ) from None

    authority = await value(_AUTHORITY, lambda: ClusterAuthority.make().dump())
    secrets = await value(_SECRETS, lambda: f"{os.urandom(32).hex()}\n".encode())
    e2b = await value(_E2B, lambda: os.urandom(32))
    egress = msgspec.json.decode(await value(_EGRESS, _make_egress), type=dict[str, bytes])
    files = {f"authority/{name}": content for name, content in egress.items()}
    return ClusterValues(ClusterAuthority.load(authority), {_SECRETS: secrets, _E2B: e2b, **files})


def _make_egress() -> bytes:
    """A new authority of sessions' networks, as its files."""
    with tempfile.TemporaryDirectory(prefix="sojourn-") as place:
        open_authority(Path(place))
        files = {name: (Path(place) / name).read_bytes() for name in (CERTIFICATE, KEY)}
    return msgspec.json.encode(files)
