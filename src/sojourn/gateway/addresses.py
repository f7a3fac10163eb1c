"""What an IP address is: public, private, or never an outside address.

Guarantee: every spelling of an address is read as the address it stands for, or refused; none is
taken for a name. The tables are written out, because what a library calls global has changed
between its releases, and an address that slips through here reaches the host or its cloud.
"""

from __future__ import annotations

import enum
import functools
import ipaddress
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AddressRefused(ValueError):
    """What looks like an address is none that may be used."""


class Class(enum.StrEnum):
    """What may be done with an address."""

    PUBLIC = "public"
    PRIVATE = "private"  # only where the operator and a rule name it
    NEVER = "never"


# Special-purpose registries of IANA, without what is globally reachable.
_V4_NEVER = [
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
]
_V4_PRIVATE = [
    ipaddress.IPv4Network(text)
    for text in ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16")
]
# Alibaba's metadata service and the wire server of Azure: link-local in all but their number.
_METADATA: frozenset[Address] = frozenset(
    ipaddress.ip_address(text) for text in ("100.100.100.200", "168.63.129.16", "fd00:ec2::254")
)
_V6_PUBLIC = ipaddress.IPv6Network("2000::/3")
_V6_PRIVATE = ipaddress.IPv6Network("fc00::/7")
_V6_NEVER = [
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # Teredo (an IPv4 address inside), benchmarks, identifiers
        "2001:db8::/32",
        "2002::/16",  # 6to4: an IPv4 address inside
        "3fff::/20",
    )
]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def parse(text: str) -> Address | None:
    """The address a host part spells, in any of the ways programs accept; None for what is no
    address. Raises AddressRefused for what is neither an address nor possibly a name."""
    if "%" in text:
        raise AddressRefused("an address with a zone reaches a link of the host")
    if ":" in text or text.startswith("["):
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        try:
            return ipaddress.IPv6Address(inner)
        except ValueError as error:
            raise AddressRefused(f"{text!r} is no address") from error
    parts = text.split(".")
    if len(parts) > 1 and not parts[-1]:
        parts.pop()
    if not _numeric(parts[-1]):
        return None
    return _loose(text, parts)


def _numeric(part: str) -> bool:
    if not part:
        return False
    if all("0" <= letter <= "9" for letter in part):
        return True
    return part[:2] in ("0x", "0X") and all(
        letter in "0123456789abcdefABCDEF" for letter in part[2:]
    )


def _loose(text: str, parts: list[str]) -> ipaddress.IPv4Address:
    """As inet_aton and browsers read it: decimal, octal and hexadecimal, one to four parts."""
    if len(parts) > 4:
        raise AddressRefused(f"{text!r} is no address")
    numbers = []
    for part in parts:
        if not _numeric(part) or len(part) > 16:
            raise AddressRefused(f"{text!r} is no address")
        try:
            if part[:2] in ("0x", "0X"):
                numbers.append(int(part[2:] or "0", 16))
            elif len(part) > 1 and part[0] == "0":
                numbers.append(int(part, 8))
            else:
                numbers.append(int(part))
        except ValueError as error:
            raise AddressRefused(f"{text!r} is no address") from error
    *leading, last = numbers
    if any(number > 255 for number in leading) or last >= 256 ** (5 - len(numbers)):
        raise AddressRefused(f"{text!r} is no address")
    value = last
    for index, number in enumerate(leading):
        value += number << (8 * (3 - index))
    return ipaddress.IPv4Address(value)


def meant(address: Address) -> Address:
    """The address that answers for this one: an IPv4 address inside an IPv6 one is itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def classify(address: Address) -> Class:
    """What may be done with an address; of one inside another, the inner one counts."""
    address = meant(address)
    if address in _METADATA:
        return Class.NEVER
    if isinstance(address, ipaddress.IPv4Address):
        if any(address in network for network in _V4_NEVER):
            return Class.NEVER
        if any(address in network for network in _V4_PRIVATE):
            return Class.PRIVATE
        return Class.PUBLIC
    if address.scope_id is not None:
        return Class.NEVER
    if address in _V6_PRIVATE:
        return Class.PRIVATE
    if address not in _V6_PUBLIC or any(address in network for network in _V6_NEVER):
        return Class.NEVER
    return Class.PUBLIC


def within(address: Address, networks: Iterable[Network]) -> bool:
    """Whether one of the networks holds the address that is meant."""
    address = meant(address)
    return any(address.version == network.version and address in network for network in networks)


@functools.lru_cache(4096)
def parse_network(text: str) -> Network:
    """A network as policies write it. Raises ValueError."""
    return ipaddress.ip_network(text, strict=False)
