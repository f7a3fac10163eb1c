"""Hooks of a session, and the certificates it trusts, in a real sandbox."""

from __future__ import annotations

from pathlib import Path

from sojourn.node import authorities, hooks
from sojourn.node.link import GuestLink
from sojourn.wire.guest import ProcessSpec
from support.guests import Sandboxes, sandboxed, supervisor_program  # noqa: F401

DIRECTORY = b"/etc/sojourn/hooks"


async def run(guest: GuestLink, text: str) -> bytes:
    state, pieces = await guest.run(ProcessSpec([b"sh", b"-c", text.encode()]))
    out = b"".join(piece.data for piece in pieces)
    assert state.exit_code == 0, out
    return out


@sandboxed
async def test_hooks_and_certificates(sandboxes: Sandboxes) -> None:
    _, guest = await sandboxes.start()
    try:
        await guest.refresh(generation="g7")
        assert await hooks.run(guest, hooks.PRE_SUSPEND, "suspend") == []
        await _one_file(guest)
        await _a_directory(guest)
        await _what_does_not_end(guest)
        await _certificates(guest)
    finally:
        await guest.close()


async def _one_file(guest: GuestLink) -> None:
    script = (
        b"#!/bin/sh\necho $SOJOURN_HOOK $SOJOURN_REASON $SOJOURN_GENERATION $SSL_CERT_FILE;"
        b" id -u; pwd; exit 3\n"
    )
    await guest.write_file(DIRECTORY + b"/pre-suspend", script, mode=0o644)
    assert await hooks.run(guest, hooks.PRE_SUSPEND, "suspend") == []  # it is no program yet
    await guest.chmod(DIRECTORY + b"/pre-suspend", 0o755)
    environment = {"SSL_CERT_FILE": "/run/sojourn/ca.pem", "SOJOURN_HOOK": "another"}
    (told,) = await hooks.run(guest, hooks.PRE_SUSPEND, "suspend", environment=environment)
    assert (told.hook, told.file, told.exit_code) == ("pre-suspend", "pre-suspend", 3)
    assert told.output == "pre-suspend suspend g7 /run/sojourn/ca.pem\n0\n/\n" and not told.ok


async def _a_directory(guest: GuestLink) -> None:
    """In the order of names; what is no program is left out; one that fails stops no other."""
    at = DIRECTORY + b"/post-resume/"
    await guest.write_file(at + b"20-second", b"#!/bin/sh\necho two >&2; kill -9 $$\n", mode=0o755)
    await guest.write_file(at + b"10-first", b"#!/bin/sh\necho one\n", mode=0o755)
    await guest.write_file(at + b"15-missing", b"#!/no/such/program\n", mode=0o755)
    await guest.write_file(at + b"readme", b"text", mode=0o644)
    await guest.mkdir(at + b"directory")
    await guest.symlink(b"/nowhere", at + b"30-broken")
    await guest.symlink(b"/bin/true", at + b"40-linked")
    told = await hooks.run(guest, hooks.POST_RESUME, "fork")
    assert [one.file for one in told] == ["10-first", "15-missing", "20-second", "40-linked"]
    assert [one.exit_code for one in told] == [0, None, None, 0]
    assert (told[0].output, told[2].output, told[2].signal) == ("one\n", "two\n", 9)
    assert told[1].error is not None and [one.ok for one in told] == [True, False, False, True]


async def _what_does_not_end(guest: GuestLink) -> None:
    """The time is for all files of a hook together; a daemon that one leaves is not waited for."""
    at = DIRECTORY + b"/post-resume/"
    await guest.write_file(at + b"05-daemon", b"#!/bin/sh\nsleep 600 &\necho left\n", mode=0o755)
    await guest.write_file(at + b"12-hangs", b"#!/bin/sh\necho in; sleep 600\n", mode=0o755)
    told = await hooks.run(guest, hooks.POST_RESUME, "resume", timeout=1.5)
    assert [one.file for one in told][:3] == ["05-daemon", "10-first", "12-hangs"]
    assert told[0].ok and told[0].output == "left\n"
    assert told[2].timed_out and told[2].output == "in\n"
    assert all(one.timed_out or one.error for one in told[3:])


async def _certificates(guest: GuestLink) -> None:
    await run(guest, "mkdir -p /etc/ssl/certs; rm -f /etc/ssl/certs/ca-certificates.crt")
    await authorities.write(guest, b"DEPLOYMENT\n")
    assert await run(guest, "cat /run/sojourn/ca.pem") == b"DEPLOYMENT\n"
    await run(guest, "printf SYSTEM > /etc/ssl/certs/ca-certificates.crt")
    await authorities.write(guest, b"DEPLOYMENT\n")
    assert await run(guest, "cat /run/sojourn/ca.pem") == b"SYSTEM\nDEPLOYMENT\n"
    # A link leads nowhere but into the session; a file without an end is not read to its end.
    secret = Path("/etc/machine-id").read_bytes() if Path("/etc/machine-id").exists() else b"-"
    await run(guest, "ln -sf /etc/machine-id /etc/ssl/certs/ca-certificates.crt")
    await authorities.write(guest, b"DEPLOYMENT\n")
    told = await run(guest, "cat /run/sojourn/ca.pem")
    assert told.endswith(b"DEPLOYMENT\n") and (not secret.strip() or secret not in told)
    await run(guest, "ln -sf /dev/zero /etc/ssl/certs/ca-certificates.crt")
    await authorities.write(guest, b"DEPLOYMENT\n")
    assert await run(guest, "cat /run/sojourn/ca.pem") == b"DEPLOYMENT\n"
    mode = await run(guest, "stat -c '%a %u' /run/sojourn/ca.pem")
    assert mode == b"644 0\n"
