"""Starting `sojourn` commands from a process that has loaded them already.

Guarantee: what is started is a process of its own with the environment, arguments and files it
was given, ends by itself or by a signal as any, and none outlives the one who started it.

Half of a server's start is loading Python modules, and the suite starts hundreds of servers. One
process per worker loads them once and forks; tests of starting itself run the real command.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, NoReturn

_MODULES = (
    "sojourn.cli.main",
    "sojourn.cli.recover",
    "sojourn.cli.store",
    "sojourn.cli.stores",
    "sojourn.cli.up",
    "sojourn.server.app",
    "sojourn.server.service_factory",
    "sojourn.server.cluster.serving",
    "sojourn.server.nodes.serving",
    "anyio._backends._asyncio",
    "uvicorn.lifespan.on",
    "uvloop",
)
_MESSAGE = 1 << 20


class Forked:
    """A process that was forked; the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, stdout: IO[str], status: int) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """The exit code (negative: the signal) once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            text = os.read(self._status, 64)
            os.close(self._status)
            # Without a word its parent is gone, which ended it.
            self.returncode = os.waitstatus_to_exitcode(int(text)) if text else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Parent:
    """The process that forks; started when it is first needed. With `module` it runs that module's
    `main` instead of `sojourn`."""

    def __init__(self, module: str | None = None) -> None:
        self._module = module
        self._owner = -1
        self._channel: socket.socket | None = None
        self._turn = threading.Lock()

    def start(self, arguments: list[str], environment: dict[str, str], log: int) -> Forked:
        """Run `sojourn` with these arguments, its standard error going to `log`."""
        channel = self._connected()
        out, out_end = os.pipe()
        status, status_end = os.pipe()
        try:
            message = json.dumps([arguments, environment, str(Path.cwd())]).encode()
            with self._turn:
                socket.send_fds(channel, [message], [out_end, log, status_end])
                pid = int(channel.recv(64))
        finally:
            os.close(out_end)
            os.close(status_end)
        return Forked(pid, os.fdopen(out, encoding="utf-8"), status)

    def _connected(self) -> socket.socket:
        if self._channel is None or self._owner != os.getpid():
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno()), self._module or ""],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            self._channel, self._owner = ours, os.getpid()
        return self._channel


parent = Parent()
"""The one of this test process."""


def run(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one `sojourn` command to its end, with nothing on its standard input."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        started = parent.start(list(arguments), environment or dict(os.environ), errors.fileno())
        with started.stdout:
            output = started.stdout.read()
        code = started.wait()
        errors.seek(0)
        return subprocess.CompletedProcess(arguments, code, output, errors.read())


class _Children:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._status: dict[int, int] = {}

    def serve(self) -> None:
        """Fork for each message until the other side closes; then end what is left."""
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wake:
                        with contextlib.suppress(BlockingIOError):
                            wake.recv(4096)
                        self._reap()
                    elif not self._take(selector, [wake, woken]):
                        self._end()
                        return

    def _take(self, selector: selectors.BaseSelector, wakers: list[socket.socket]) -> bool:
        message, files, _, _ = socket.recv_fds(self._channel, _MESSAGE, 3)
        if not message:
            return False
        arguments, environment, directory = json.loads(message)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            selector.close()
            for end in (self._channel, *wakers):
                end.close()
            for status in (*self._status.values(), files[2]):
                os.close(status)
            _run(arguments, environment, directory, files[0], files[1])
        self._status[pid] = files[2]
        for file in files[:2]:
            os.close(file)
        self._channel.send(str(pid).encode())
        return True

    def _reap(self) -> None:
        while self._status:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with contextlib.suppress(BrokenPipeError):
                os.write(self._status[pid], str(status).encode())
            os.close(self._status.pop(pid))

    def _end(self) -> None:
        for pid in self._status:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _run(
    arguments: list[str], environment: dict[str, str], directory: str, out: int, log: int
) -> NoReturn:
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(log, 2)
        os.close(out)
        os.close(log)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        time.tzset()
        random.seed()
        # Read from the environment when it is loaded.
        importlib.reload(importlib.import_module("sojourn.faultpoints"))
        code = importlib.import_module(_module() or "sojourn.cli.main").run(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _module() -> str:
    return sys.argv[2]


def main() -> None:
    """Load, then fork as asked."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in _MODULES:
        importlib.import_module(name)
    if _module():
        sys.path.insert(0, str(Path(__file__).parents[1]))
        importlib.import_module(_module())
    importlib.import_module("litestar").Litestar([])  # which loads the plugins it finds
    # What is loaded is not looked at again by the collector of each child.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    _Children(channel).serve()


if __name__ == "__main__":
    main()
