"""Running the host's programs for a set-up.

Guarantee: a program started here ends when the set-up ends, however that ends, so no build goes on
writing into a directory that its set-up has given up; and a failure carries the program's own last
words, since they name the cause.
"""

from __future__ import annotations

import collections
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sojourn.errors import HostUnfit

_KEPT_LINES = 15
_PASSED_ON = {
    "PATH",
    "HOME",
    "TMPDIR",
    "http_proxy",
    "https_proxy",
    "ftp_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "APT_CONFIG",
    "CC",
}


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a program needs to know: the paths and proxies of the host, a neutral locale."""
    environment = {name: value for name, value in os.environ.items() if name in _PASSED_ON}
    environment.setdefault("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    if "sbin" not in environment["PATH"]:
        environment["PATH"] += ":/usr/sbin:/sbin"
    environment |= {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    return environment | dict(extra or {})


def run_command(
    command: Sequence[str],
    *,
    what: str,
    next_step: str | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> str:
    """Run a program to its end and give back its output (both streams, as printed).

    `on_line` sees every line as it comes. Raises HostUnfit naming `what` failed.
    """
    kept: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
    output: list[str] = []
    try:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=cwd,
            env=clean_environment(environment),
        )
    except FileNotFoundError as error:
        raise HostUnfit(
            f"{what}: {error.filename} is missing",
            next_step="Install the package util-linux.",
        ) from error
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                output.append(line)
                text = line.rstrip()
                if text:
                    kept.append(text)
                    if on_line is not None:
                        on_line(text)
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code != 0:
        words = "\n".join(kept)
        raise HostUnfit(
            f"{what} failed ({command[0]} ended with {code}):\n{words}",
            next_step=next_step,
            command=list(command),
        )
    return "".join(output)
