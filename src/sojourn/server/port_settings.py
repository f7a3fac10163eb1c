"""Where exposed ports are served, by an operator's words.

Guarantee: what is no address or domain is refused at the start, with what to give instead.
"""

from __future__ import annotations

import ipaddress
import re

import msgspec

from sojourn.database.base import Database
from sojourn.errors import InvalidRequest

OUTSIDE = "ports"
"""The cluster's value that says where servers listen for exposed ports."""
_DOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")


class Outside(msgspec.Struct, frozen=True):
    """Where the servers of a cluster listen for exposed ports."""

    domain: str
    host: str
    port: int


class PortSettings(msgspec.Struct, frozen=True):
    """Where exposed ports are served: `address` is HOST or HOST:PORT, and without a port a free one
    that stays the same; below `domain` each port of a session has a name. Where something else
    is in front, `domain` is what is seen from outside: `https://DOMAIN` or
    `http://DOMAIN:PORT`. `outside` says that servers of a cluster listen, and carry what comes
    to this node."""

    address: str = "127.0.0.1"
    domain: str = "localhost"
    outside: Outside | None = None

    def public(self) -> Public:
        """What `domain` says. Raises InvalidRequest."""
        scheme, told, rest = self.domain.partition("://")
        name, colon, port = (rest if told else self.domain).removesuffix("/").partition(":")
        if (told and scheme not in ("http", "https")) or not _DOMAIN.fullmatch(name):
            raise InvalidRequest(f"{self.domain!r} is no domain", field="ports-domain")
        if not told:
            if colon:
                raise InvalidRequest(
                    f"{self.domain!r} has a port without saying what is spoken there",
                    next_step=f"Give http://{self.domain} or https://{self.domain}, or the name"
                    " alone: then the port is that of the server itself.",
                    field="ports-domain",
                )
            return Public(name)
        if colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise InvalidRequest(f"{self.domain!r}: {port!r} is no port", field="ports-domain")
        usual = 443 if scheme == "https" else 80
        return Public(name, scheme, int(port) if colon else usual)

    def split(self) -> tuple[str, int]:
        """Host and port (0: any). Raises InvalidRequest."""
        host, colon, port = self.address.rpartition(":")
        if not colon or self.address.endswith("]"):
            host, port = self.address, "0"
        host = host.strip("[]")
        try:
            ipaddress.ip_address(host)
        except ValueError:
            host = ""
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise InvalidRequest(
                f"{self.address!r} is not ADDRESS or ADDRESS:PORT", field="ports-address"
            )
        return host, int(port)


class Public(msgspec.Struct, frozen=True):
    """How exposed ports are named from outside; without a `port` at the server's own."""

    domain: str
    scheme: str = "http"
    port: int | None = None

    def suffix(self, own: int) -> str:
        """What stands behind a host; `own` is where the server listens."""
        number = own if self.port is None else self.port
        return "" if number == (443 if self.scheme == "https" else 80) else f":{number}"


async def of_cluster(database: Database, settings: PortSettings) -> PortSettings:
    """A node's settings, with where the servers listen."""
    kept = await database.cluster_value(OUTSIDE)
    if kept is None:
        return settings
    outside = msgspec.json.decode(kept, type=Outside)
    return msgspec.structs.replace(settings, domain=outside.domain, outside=outside)
