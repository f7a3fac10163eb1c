"""Names of images in registries.

Guarantee: a name means one image of one registry: the registry's host is always written, because
what a short name leads to is decided by whoever reads it.
"""

from __future__ import annotations

import ipaddress
import re

import msgspec

from sojourn.errors import InvalidRequest
from sojourn.images.documents import check_digest

_HOST = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
    r"(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?"
)
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Reference(msgspec.Struct, frozen=True):
    """An image of a registry; `digest` says exactly which, `tag` which it is today."""

    host: str
    repository: str
    tag: str | None
    digest: str | None

    @property
    def loopback(self) -> bool:
        """Whether the registry is this machine."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host, perhaps with a port, is this machine whatever a resolver says."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def parse_reference(text: str) -> Reference:
    """`HOST[:PORT]/NAME[:TAG][@DIGEST]`. Raises InvalidRequest."""
    before, at, digest = text.partition("@")
    host, slash, path = before.partition("/")
    known = "." in host or ":" in host or host == "localhost"
    if not slash or not known or not _HOST.fullmatch(host):
        raise InvalidRequest(
            f"{text[:200]!r} is no image: neither oci:DIR, docker-archive:FILE nor"
            " REGISTRY/NAME:TAG",
            next_step="Write the registry's host before the image's name.",
            field="source",
        )
    repository, colon, tag = path.partition(":")
    parts = repository.split("/")
    if len(repository) > 255 or not all(_PART.fullmatch(part) for part in parts):
        raise InvalidRequest(f"{repository[:200]!r} is no name of an image", field="source")
    if colon and not _TAG.fullmatch(tag):
        raise InvalidRequest(f"{tag[:200]!r} is no tag", field="source")
    if at:
        check_digest(digest)
    if not colon and not at:
        tag = "latest"
    return Reference(host, repository, tag or None, digest or None)
