"""C41, C42, C43: what a capture meets in a living session is carried over, or refused in time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from sojourn.client import Process, Session, Sojourn
from sojourn.errors import CaptureRefused, Interrupted, SojournError, UnlinkedOpenFile
from support.servers import eventually

HOLD = """
import os, sys, time
path = sys.argv[1]
file = open(path, "w+b")
file.write(b"still here")
file.flush()
os.unlink(path)
print("ready", flush=True)
while True:
    sys.stdin.readline()
    file.seek(0)
    print(file.read().decode(), flush=True)
"""


def ready(process: Process) -> None:
    for piece in process.output():
        if b"ready" in piece.data:
            return
    raise AssertionError("the process ended")


def holding(session: Session, path: str) -> Process:
    process = session.spawn(["python3", "-c", HOLD, path], stdin="pipe")
    ready(process)
    return process


def ask(process: Process) -> bytes:
    before = process.refresh().info.stdout[1]
    process.write("\n")
    pieces = b""
    with contextlib.closing(process.output((before, 0))) as output:
        for piece in output:
            pieces += piece.data
            if pieces.endswith(b"\n"):
                break
    return pieces


def test_c41_refused_by_name_while_the_session_runs_on(session: Session) -> None:
    process = holding(session, "/srv/gone")
    for take in (session.snapshot, session.suspend, lambda: session.fork(1)):
        with pytest.raises(UnlinkedOpenFile) as raised:
            take()
        assert raised.value.details["pid"] == process.pid
        assert raised.value.details["path"] == "/srv/gone"
        assert session.refresh().state == "running"
    assert ask(process) == b"still here\n"
    # A snapshot of the files alone works, and so do the automatic ones.
    session.files.write("/srv/kept", b"kept")
    taken = session.snapshot("files", memory=False)
    assert taken.memory is False
    assert ask(process) == b"still here\n"
    process.kill()
    assert session.snapshot("all").memory is True
    session.rollback(taken)
    assert session.files.read("/srv/kept") == b"kept"


def test_c41_automatic_snapshots_fall_back_to_files(session: Session) -> None:
    holding(session, "/srv/gone")
    session.files.write("/srv/change", b"1")

    def files_only() -> bool:
        taken = [one for one in session.history() if one.kind == "auto"]
        return bool(taken) and not taken[-1].memory

    assert eventually(files_only)
    refused = [event for event in session.events() if event.kind == "snapshot.refused"]
    assert refused[-1].result == "unlinked_open_file"
    assert refused[-1].details["path"] == "/srv/gone"


def test_c41_forced_suspend_without_memory(session: Session) -> None:
    holding(session, "/srv/gone")
    session.files.write("/srv/kept", b"kept")
    session.suspend(memory=False)
    assert session.files.read("/srv/kept") == b"kept"
    assert not [one for one in session.processes() if one.running]


@pytest.mark.parametrize("path", ["/tmp/gone", "/dev/shm/gone", "/run/gone"])
def test_c41_on_a_memory_file_system_it_is_carried_over(session: Session, path: str) -> None:
    process = holding(session, path)
    session.suspend()
    session.resume()
    assert ask(process) == b"still here\n"
    [fork] = session.fork(1)
    assert ask(fork.process(process.id)) == b"still here\n"
    fork.delete()


@pytest.mark.parametrize(
    "script",
    [
        # a memory map of a file whose name is gone
        """
import mmap, os
file = open("/srv/mapped", "w+b"); file.truncate(4096)
area = mmap.mmap(file.fileno(), 4096); file.close(); os.unlink("/srv/mapped")
check = lambda: area[:1].hex()
""",
        # the same with its descriptor closed
        """
import ctypes, os
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
file = open("/srv/closed", "w+b"); file.truncate(4096)
at = libc.mmap(None, ctypes.c_size_t(4096), 3, 1, file.fileno(), ctypes.c_long(0)); file.close()
os.unlink("/srv/closed")
check = lambda: ctypes.string_at(at, 1).hex()
""",
        # an open directory that was removed
        """
import os
os.mkdir("/srv/dir"); handle = os.open("/srv/dir", os.O_RDONLY); os.rmdir("/srv/dir")
check = lambda: str(os.fstat(handle).st_nlink >= 0)
""",
        # the working directory was removed
        """
import os
os.mkdir("/srv/cwd"); os.chdir("/srv/cwd"); os.rmdir("/srv/cwd")
check = lambda: "here"
""",
        # the name was taken by another file
        """
import os
file = open("/srv/taken", "w+"); file.write("old"); file.flush()
open("/srv/new", "w").write("new"); os.rename("/srv/new", "/srv/taken")
check = lambda: (file.seek(0), file.read())[1]
""",
        # the running program was replaced, as package managers do
        """
import os, shutil, subprocess
shutil.copy("/bin/sleep", "/srv/program")
child = subprocess.Popen(["/srv/program", "1000"])
shutil.copy("/bin/sleep", "/srv/program.new"); os.rename("/srv/program.new", "/srv/program")
check = lambda: str(child.poll())
""",
        # anonymous memory with a descriptor
        """
import os
handle = os.memfd_create("area"); os.write(handle, b"anonymous")
check = lambda: os.pread(handle, 9, 0).decode()
""",
    ],
)
def test_c41_captured_or_refused_but_never_lost(session: Session, script: str) -> None:
    script += """
import sys
print("ready", flush=True)
while True:
    sys.stdin.readline()
    print(check(), flush=True)
"""
    process = session.spawn(["python3", "-c", script], stdin="pipe")
    ready(process)
    before = ask(process)
    try:
        session.suspend()
    except CaptureRefused as error:
        assert error.details["pid"]
        assert session.refresh().state == "running"
    else:
        assert session.state == "suspended"
    assert ask(process) == before


def test_c42_a_stream_that_is_open_ends_typed_and_can_be_taken_up(client: Sojourn) -> None:
    session = client.sessions.create(policy={"auto_snapshot": "off"})
    try:
        script = "for i in $(seq 1 2000); do echo $i; sleep 0.01; done"
        process = session.spawn(script)
        got = b""
        ended: SojournError | None = None
        try:
            for piece in process.output():
                got += piece.data
                if got.count(b"\n") == 20:
                    session.suspend()
        except Interrupted as error:
            ended = error
        assert ended is None or ended.code == "interrupted"
        assert session.refresh().state in ("suspended", "running")
        while got.count(b"\n") < 60:
            with contextlib.suppress(Interrupted):
                for piece in process.output((len(got), 0)):
                    assert piece.offset == len(got)
                    got += piece.data
                    if got.count(b"\n") >= 60:
                        break
        lines = got.split(b"\n")[:-1]
        assert lines == [str(number).encode() for number in range(1, len(lines) + 1)]
    finally:
        session.delete()


def test_c42_a_command_that_is_waited_for_survives_a_suspend(session: Session) -> None:
    """Whoever waits for a command learns its end, or is told where to look for it."""
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(session.exec("echo begin; sleep 2; echo end"))
        except SojournError as error:
            found.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert eventually(lambda: [one for one in session.processes() if one.running])
    session.suspend()
    session.resume()
    waiter.join(60)
    assert not waiter.is_alive()
    [result] = found
    if isinstance(result, Interrupted):
        process = session.process(result.details["process"])
        assert process.wait(30).exit_code == 0
    else:
        assert result.text == "begin\nend\n"  # type: ignore[attr-defined]


IO_URING = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
handle = libc.syscall(425, 8, ctypes.create_string_buffer(120))
print("ready", handle, ctypes.get_errno(), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    "script",
    [
        IO_URING,
        "import select, time; e = select.epoll(); print('ready', flush=True); time.sleep(1000)",
        "import os, time; r, w = os.pipe(); os.write(w, b'x'); print('ready', flush=True);"
        " time.sleep(1000)",
        "import signal, time; signal.setitimer(signal.ITIMER_REAL, 1000); print('ready',"
        " flush=True); time.sleep(1000)",
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); c ="
        " socket.create_connection(s.getsockname()); print('ready', flush=True); time.sleep(1000)",
        "import fcntl, time; f = open('/srv/lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        " print('ready', flush=True); time.sleep(1000)",
        "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep,"
        " args=(1000,), daemon=True).start()\nprint('ready', flush=True); time.sleep(1000)",
        "import os, pty, time; m, s = pty.openpty(); print('ready', flush=True); time.sleep(1000)",
    ],
)
def test_c43_kernel_objects_are_carried_over_or_named(session: Session, script: str) -> None:
    process = session.spawn(["python3", "-c", script])
    ready(process)
    try:
        session.suspend()
    except CaptureRefused as error:
        assert error.details["pid"] == process.pid
        assert session.refresh().state == "running"
    assert process.refresh().running
    process.kill()
    assert eventually(lambda: not process.refresh().running)


@pytest.fixture(autouse=True)
def _usable(session: Session) -> Iterator[None]:
    """Whatever was met: the session serves afterwards."""
    yield
    assert session.exec("echo usable").text == "usable\n"
