"""The certificates that programs in a session trust.

Guarantee: after `write`, /run/sojourn/ca.pem holds what the session's files trust by themselves and
the deployment's authority. It is on a memory file system, so no layer ever holds the authority,
and read through the supervisor, so a link planted inside leads nowhere but into the session.
"""

from __future__ import annotations

from sojourn.errors import Interrupted, SandboxLost, SojournError
from sojourn.node.guest import Guest

BUNDLE = b"/run/sojourn/ca.pem"

_SYSTEM = (
    b"/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine
    b"/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
    b"/etc/ssl/ca-bundle.pem",  # openSUSE
)
_MOST_BYTES = 4 << 20


async def write(guest: Guest, authority: bytes) -> None:
    """Write the bundle: the session's own, then `authority` (certificates, PEM)."""
    system = await _system(guest)
    if system and not system.endswith(b"\n"):
        system += b"\n"
    await guest.write_file(BUNDLE, system + authority, mode=0o644, user="0")


async def _system(guest: Guest) -> bytes:
    for path in _SYSTEM:
        try:
            facts = await guest.stat(path)
            if facts.type != "file" or facts.size > _MOST_BYTES:
                continue
            return b"".join([piece async for piece in guest.read(path, 0, _MOST_BYTES)])
        except (SandboxLost, Interrupted):
            raise
        except SojournError:
            continue  # not this distribution's name
    return b""
