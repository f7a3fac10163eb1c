"""What a session wants done inside before it is put away and after it came back.

Guarantee: a hook can delay a suspension or a return by its timeout and no longer, and stops
neither: how each ended is told to the caller, for the event log.

A hook is an executable regular file, /etc/sojourn/hooks/NAME, or a directory of such files, run one
after the other in the order of their names. It runs as root, in `/`, with what every command of the
session has in its environment, and SOJOURN_HOOK, SOJOURN_REASON and SOJOURN_GENERATION.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping

import msgspec

from sojourn.errors import FileConflict, FileMissing, Interrupted, SandboxLost, SojournError
from sojourn.node.guest import Guest
from sojourn.wire.guest import ProcessSpec, Stat

DIRECTORY = b"/etc/sojourn/hooks"
PRE_SUSPEND = "pre-suspend"
POST_RESUME = "post-resume"
TIMEOUT = 30.0  # seconds, for all files of one hook together

_MOST_FILES = 64
_GRACE = 5.0
_TAIL_BYTES = 2048
_KEEP_BYTES = 64 << 10
_GENERATION = b"/run/sojourn/generation"


class HookRun(msgspec.Struct, frozen=True):
    """How one file of a hook ended: by `exit_code`, by `signal`, at the timeout, or not at all
    (`error` says why). `output` is the end of what it wrote."""

    hook: str
    file: str
    exit_code: int | None
    signal: int | None
    timed_out: bool
    seconds: float
    output: str
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it did what it was there for."""
        return self.exit_code == 0


async def run(
    guest: Guest,
    name: str,
    reason: str,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> list[HookRun]:
    """Run a hook ("pre-suspend" or "post-resume"); nothing when the session has none.

    `reason` is suspend, resume, fork or rollback; `environment` is what the sandbox provides to
    commands besides the session's own. Raises SandboxLost and Interrupted alone.
    """
    try:
        files = await _files(guest, DIRECTORY + b"/" + name.encode())
    except (SandboxLost, Interrupted):
        raise
    except SojournError as error:
        return [HookRun(name, name, None, None, False, 0.0, "", error.message)]
    if not files:
        return []
    env = {
        **{os.fsencode(key): os.fsencode(text) for key, text in (environment or {}).items()},
        b"SOJOURN_HOOK": name.encode(),
        b"SOJOURN_REASON": reason.encode(),
        b"SOJOURN_GENERATION": await _generation(guest),
    }
    deadline = time.monotonic() + timeout
    return [await _run_file(guest, name, path, env, deadline - time.monotonic()) for path in files]


async def _files(guest: Guest, path: bytes) -> list[bytes]:
    try:
        found = await guest.stat(path)
        if found.type != "dir":
            return [path] if _is_hook(found) else []
        entries = await guest.list(path)
    except (FileMissing, FileConflict):
        return []
    names = sorted(entry.path.rpartition(b"/")[2] for entry in entries)
    files = []
    for name in names[:_MOST_FILES]:
        try:
            if _is_hook(await guest.stat(path + b"/" + name)):
                files.append(path + b"/" + name)
        except (FileMissing, FileConflict):
            continue  # a link to nothing, or removed meanwhile
    return files


def _is_hook(found: Stat) -> bool:
    return found.type == "file" and bool(found.mode & 0o111)


async def _generation(guest: Guest) -> bytes:
    try:
        return b"".join([piece async for piece in guest.read(_GENERATION, 0, 256)]).strip()
    except (SandboxLost, Interrupted):
        raise
    except SojournError:
        return b""  # root inside may have removed it; the hook can see that for itself


async def _run_file(
    guest: Guest, hook: str, path: bytes, env: dict[bytes, bytes], left: float
) -> HookRun:
    file = path.rpartition(b"/")[2].decode(errors="backslashreplace")
    if left <= 0:
        return HookRun(hook, file, None, None, True, 0.0, "", "no time was left for it")
    spec = ProcessSpec(
        [path], env=env, cwd=b"/", user="0", timeout=left, keep=_KEEP_BYTES, tag=f"hook {hook}"
    )
    began = time.monotonic()
    try:
        # The timeout is kept inside; a supervisor that does not keep it is not waited for.
        async with asyncio.timeout(left + _GRACE):
            state, outputs = await guest.run(spec)
    except TimeoutError:
        return HookRun(hook, file, None, None, True, left + _GRACE, "", "no answer")
    except (SandboxLost, Interrupted):
        raise
    except SojournError as error:
        return HookRun(hook, file, None, None, False, 0.0, "", error.message)
    said = b"".join(output.data for output in outputs)[-_TAIL_BYTES:]
    return HookRun(
        hook,
        file,
        state.exit_code,
        state.signal,
        state.timed_out,
        round(time.monotonic() - began, 3),
        said.decode(errors="replace"),
        state.reason,
    )
