"""Host parts as programs say them, read into one form.

Guarantee: two spellings of one host become equal, so a rule cannot be passed by writing a name
differently; whatever has no single meaning is refused. Names are compared in their ASCII form:
look-alike letters stay different names.
"""

from __future__ import annotations

import functools
import re

import idna
import msgspec

from sojourn.gateway.addresses import Address, AddressRefused, parse

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\Z")
_LONGEST = 253


class HostRefused(ValueError):
    """A host part has no single meaning."""


class Host(msgspec.Struct, frozen=True):
    """A name in lower-case ASCII without a dot at its end, or an address."""

    name: str | None = None
    address: Address | None = None

    def __str__(self) -> str:
        return self.name if self.name is not None else str(self.address)


def read_host(said: str | bytes) -> Host:
    """The host that was said. Raises HostRefused."""
    try:
        text = said.decode("utf-8") if isinstance(said, bytes) else said
    except UnicodeDecodeError as error:
        raise HostRefused("a host is not UTF-8") from error
    if not text or len(text) > 1024:
        raise HostRefused("a host is empty or too long")
    if not text.isascii():
        try:
            text = idna.encode(text, uts46=True).decode("ascii")
        except (idna.IDNAError, UnicodeError) as error:
            raise HostRefused("a host is no name") from error
    text = text.lower()
    try:
        address = parse(text)
    except AddressRefused as error:
        raise HostRefused(str(error)) from error
    if address is not None:
        return Host(address=address)
    return Host(name=_name(text))


def _name(text: str) -> str:
    text = text.removesuffix(".")
    labels = text.split(".")
    if len(text) > _LONGEST or not all(_LABEL.match(label) for label in labels):
        raise HostRefused("a host is no name")
    return text


def read_authority(said: str | bytes, default_port: int) -> tuple[Host, int]:
    """Host and port of `host`, `host:port` or `[address]:port`. Raises HostRefused: also for a
    user, which some programs take for the host."""
    try:
        text = said.decode("utf-8") if isinstance(said, bytes) else said
    except UnicodeDecodeError as error:
        raise HostRefused("a host is not UTF-8") from error
    if text.startswith("["):
        inner, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise HostRefused("a host is no address")
        host, port = read_host(f"[{inner}]"), rest[1:]
        if rest == ":":
            raise HostRefused("a port is empty")
    else:
        said_host, colon, port = text.partition(":")
        host = read_host(said_host)
        if colon and not port:
            raise HostRefused("a port is empty")
    return host, read_port(port) if port else default_port


def read_port(text: str) -> int:
    """A port from 1 to 65535, in plain digits. Raises HostRefused."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise HostRefused("a port is no number from 1 to 65535")
    return int(text)


def covers(pattern: str, name: str) -> bool:
    """Whether a rule's domain covers a name: itself, or with `*.` everything below it."""
    below, named = _read_pattern(pattern)
    if named is None:
        return False
    return name.endswith("." + named) if below else name == named


@functools.lru_cache(4096)
def _read_pattern(pattern: str) -> tuple[bool, str | None]:
    below = pattern.startswith("*.")
    try:
        return below, read_host(pattern[2:] if below else pattern).name
    except HostRefused:
        return below, None
