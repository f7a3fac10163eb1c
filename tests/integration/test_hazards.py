"""The facts that the pages under docs/hazards state, each shown on a real session.

Some of them are hazards that Sojourn does not take away: when such a test fails because things
became better, its page has to say so.
"""

from __future__ import annotations

import ast
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import CaptureRefused, SandboxLost
from support.servers import ServerProcess, eventually

# As agreed for the clock after a resume: bracketed by the host's own, so not a measure of speed.
WALL_SECONDS = 0.5


def value(session: Session, code: str) -> Any:
    """What an expression is worth inside."""
    result = session.run_code(code)
    assert result.error is None, result.error
    return ast.literal_eval(result.text or "None")


# -- clock ------------------------------------------------------------------------------------


def test_clocks_and_timers_count_the_time_away(session: Session) -> None:
    session.run_code("import time; wall, mono = time.time(), time.monotonic()")
    sleeper = session.spawn("cut -d' ' -f1 /proc/uptime; sleep 1; date +%s.%N")
    eventually(lambda: list(sleeper.output(follow=False)))
    session.suspend()
    away = time.time()
    time.sleep(1.5)
    session.resume()
    before = time.time()
    seen, mono = value(session, "time.time() - 0, time.monotonic() - mono")
    assert before - WALL_SECONDS <= seen <= time.time() + WALL_SECONDS
    assert abs(mono - value(session, f"{seen!r} - wall")) < WALL_SECONDS
    assert mono >= 1.5
    # A timer that came due meanwhile fires at the resume; it does not wait for its rest.
    assert sleeper.wait().exit_code == 0
    woke = float(b"".join(piece.data for piece in sleeper.output()).split()[-1])
    assert woke >= away + 1.5 - WALL_SECONDS


# -- entropy ----------------------------------------------------------------------------------

DRAWS = "random.random(), ssl.RAND_bytes(8), os.urandom(8)"


def test_forks_repeat_what_programs_keep_of_chance_and_not_the_kernel(session: Session) -> None:
    session.run_code("import os, random, ssl; random.random(); ssl.RAND_bytes(8)")
    forks = session.fork(n=2)
    try:
        one, two = (value(fork, DRAWS) for fork in forks)
        assert one[0] == two[0], "Python's generator went on from one state"
        assert one[1] == two[1], "OpenSSL's generator went on from one state"
        assert one[2] != two[2], "the kernel's is another in each"
        seeds = {fork.files.read("/run/sojourn/generation") for fork in forks}
        seeds.add(session.files.read("/run/sojourn/generation"))
        assert len(seeds) == 3
        assert len({value(fork, "hash('a')") for fork in forks}) == 1
        # What the page recommends.
        for fork in forks:
            fork.run_code("ssl.RAND_add(os.urandom(32), 32.0); random.seed()")
        one, two = (value(fork, DRAWS) for fork in forks)
        assert all(a != b for a, b in zip(one, two, strict=True))
    finally:
        for fork in forks:
            fork.delete()


def test_the_generation_changes_where_memory_is_restored_and_only_there(session: Session) -> None:
    def generation() -> bytes:
        return session.files.read("/run/sojourn/generation")

    first = generation()
    session.snapshot("here")
    session.pause()
    session.resume()
    assert generation() == first
    session.suspend()
    second = generation()
    session.rollback("here")
    assert len({first, second, generation()}) == 3


def test_every_user_may_read_the_generation_and_only_root_change_it(client: Sojourn) -> None:
    for driver in ("gvisor", "bubblewrap"):
        session = client.sessions.create(driver=driver)
        try:
            read = session.exec(["cat", "/run/sojourn/generation"], user="agent")
            assert read.ok and read.stdout == session.files.read("/run/sojourn/generation")
            for command in ("touch /run/sojourn/mine", "mv /run/sojourn/generation /tmp/"):
                assert session.exec(command, user="agent").exit_code == 1, (driver, command)
        finally:
            session.delete()


# -- network ----------------------------------------------------------------------------------

REACH = """
import socket
def outcome(call):
    try:
        call()
    except OSError as error:
        return type(error).__name__, error.errno
    return "reached", 0
found = [outcome(lambda: socket.getaddrinfo("example.org", 443))]
for family, address in (
    (socket.AF_INET, ("192.0.2.1", 80)),
    (socket.AF_INET, ("169.254.169.254", 80)),
    (socket.AF_INET, ("10.0.0.1", 53)),
    (socket.AF_INET6, ("2001:db8::1", 80)),
):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(family, kind) as one:
            one.settimeout(10)
            # A datagram may be connected to any address; who sends one learns that it is refused.
            found.append(outcome(lambda: (one.connect(address), one.send(b"?"), one.recv(9))))
interfaces = sorted(line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line)
"""


def test_there_is_no_way_out(client: Sojourn, session: Session) -> None:
    weaker = client.sessions.create(driver="bubblewrap")
    try:
        for one in (session, weaker):
            assert one.run_code(REACH).error is None
            found, interfaces = value(one, "found, interfaces")
            assert interfaces == ["lo"]
            assert all(kind != "reached" and kind != "TimeoutError" for kind, _ in found), found
    finally:
        weaker.delete()


SOCKETS = """
import socket
listener = socket.create_server(("127.0.0.1", 3000))
client = socket.create_connection(("127.0.0.1", 3000))
served, _ = listener.accept()
left, right = socket.socketpair()
left.send(b"under way")
"""
USE = "(client.send(b'hi'), served.recv(9), right.recv(9), left.send(b'under way'))"
FRESH = "[socket.create_connection(('127.0.0.1', 3000)).close(), listener.accept()[1][0]]"


def test_loopback_connections_go_on_in_each_fork(session: Session) -> None:
    session.run_code(SOCKETS)
    session.suspend()
    (fork,) = session.fork()
    try:
        for one in (session, fork):
            for _ in range(2):
                assert value(one, USE) == (2, b"hi", b"under way", 9)
            assert value(one, FRESH) == [None, "127.0.0.1"]
    finally:
        fork.delete()


# -- secrets ----------------------------------------------------------------------------------


def test_a_fork_inherits_every_secret(client: Sojourn) -> None:
    session = client.sessions.create(env={"API_KEY": "in-the-environment"})
    try:
        session.files.write("/root/key", b"in-a-file")
        session.run_code("key = 'in-memory'")
        (fork,) = session.fork()
        try:
            assert fork.exec("echo $API_KEY; cat key").text == "in-the-environment\nin-a-file"
            assert value(fork, "key") == "in-memory"
        finally:
            fork.delete()
    finally:
        session.delete()


def test_commands_are_in_the_event_log_and_their_input_is_not(session: Session) -> None:
    session.exec(["true", "said-in-an-argument"])
    session.exec("cat >/dev/null", stdin=b"said-on-standard-input")
    session.exec("true", env={"KEY": "said-in-a-variable"})
    session.files.write("/root/key", b"said-in-a-file")
    told = repr(session.events())
    assert "said-in-an-argument" in told
    for quiet in ("said-on-standard-input", "said-in-a-variable", "said-in-a-file"):
        assert quiet not in told


def _places(data: Path, secret: str) -> set[str]:
    """Which parts of a data directory hold a secret, as it stands."""
    done = subprocess.run(
        ["grep", "-rla", "--exclude-dir=sandboxes", secret, str(data)],
        capture_output=True,
        text=True,
        check=False,
    )
    return {Path(line).relative_to(data).parts[0] for line in done.stdout.splitlines()}


def test_a_secret_lies_in_the_store_until_its_session_is_deleted(
    shared_server: ServerProcess, client: Sojourn
) -> None:
    data, secret = shared_server.data, "quite-a-secret-42"
    assert data.stat().st_mode & 0o777 == 0o700
    session = client.sessions.create()
    try:
        session.run_code("key = '-'.join(['quite', 'a', 'secret', '42'])")
        session.exec("cat >/root/key", stdin=secret.encode())
        session.suspend()
        assert "store" in _places(data, secret), "memory and files are stored as they are"
        assert shared_server.token not in (data / "sojourn.db").read_bytes().decode("latin-1")
    finally:
        session.delete()
    eventually(lambda: "store" not in _places(data, secret))


def test_environment_is_not_in_the_host_process_list(client: Sojourn) -> None:
    secret = "listed-nowhere-42"
    session = client.sessions.create(env={"API_KEY": secret})
    try:
        assert session.exec("echo $API_KEY").text.strip() == secret
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    told = (entry / "cmdline").read_bytes()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                assert secret.encode() not in told
    finally:
        session.delete()


# -- databases --------------------------------------------------------------------------------

WRITER = """
import sqlite3, itertools
database = sqlite3.connect("/root/rows.db", isolation_level=None)
database.execute("pragma journal_mode=wal")
database.execute("create table rows(n integer)")
for n in itertools.count(1):
    database.execute("insert into rows values (?)", (n,))
"""
LOOK = """python3 -c '
import sqlite3
d = sqlite3.connect("/root/rows.db")
rows = [r[0] for r in d.execute("select n from rows order by rowid")]
print(d.execute("pragma integrity_check").fetchone()[0], rows == list(range(1, len(rows) + 1)),
      len(rows))'
"""


def looked(session: Session) -> tuple[str, str, int]:
    result = session.exec(LOOK)
    assert result.ok, result.stderr
    sound, linear, rows = result.text.split()
    return sound, linear, int(rows)


def test_a_database_in_use_is_whole_after_every_way_back(session: Session) -> None:
    writer = session.spawn(["python3", "-c", WRITER])
    eventually(lambda: session.files.exists("/root/rows.db-wal"))
    eventually(lambda: session.exec(LOOK).ok)
    session.snapshot("with-memory")
    session.snapshot("files-only", memory=False)
    at_snapshot = looked(session)
    session.suspend()
    after = looked(session)
    assert after[:2] == ("ok", "True") and after[2] > at_snapshot[2]
    # With memory the writer goes on; without it the database recovers as after a power cut.
    session.rollback("with-memory")
    first = looked(session)
    assert first[:2] == ("ok", "True")
    assert eventually(lambda: looked(session)[2] > first[2])
    assert session.process(writer.id).info.running
    session.rollback("files-only")
    assert looked(session)[:2] == ("ok", "True")
    assert session.exec(["pgrep", "-f", "itertools"]).exit_code == 1


# -- who reaches the node ---------------------------------------------------------------------

POSE = """
import os, socket, sys, time
outcomes = set()
while not outcomes & {"connected", "PermissionError"}:
    try:
        socket.socket(socket.AF_UNIX).connect("/run/sojourn/node/node.sock")
        outcomes.add("connected")
    except OSError as error:
        outcomes.add(type(error).__name__)
    time.sleep(0.0005)
print(sorted(outcomes)[-1])
"""


def test_only_root_inside_reaches_the_node(session: Session) -> None:
    posing = session.spawn(["python3", "-c", POSE], user="agent")

    def reached() -> bool:
        session.pause()
        session.resume()
        return not session.process(posing.id).info.running

    eventually(reached, timeout=60)
    said = b"".join(piece.data for piece in session.process(posing.id).output())
    assert said.strip() == b"PermissionError"
    # Root may come first; the session and the server are none the worse for it.
    posing = session.spawn(["python3", "-c", POSE])
    eventually(reached, timeout=60)
    assert session.exec("echo still here").text.strip() == "still here"


REMOUNT = """
mount -o remount,rw /run/sojourn/node; mount -o remount,rw /run/sojourn/supervisor
chmod 4666 /run/sojourn/supervisor; chmod 0 /run/sojourn/node
echo forged > /run/sojourn/node/file; ln -s /etc/passwd /run/sojourn/node/link
rm -f /run/sojourn/node/*; grep /run/sojourn/node /proc/mounts
"""


def test_root_inside_changes_nothing_of_the_host(
    session: Session, shared_server: ServerProcess
) -> None:
    programs = list((shared_server.data / "gvisor/supervisors").iterdir())
    before = [(path, path.stat().st_mode) for path in programs]
    session.suspend()
    for moment in ("after a restore", "after it was tried"):
        # In a namespace of its own, root may mount anew what it was given read-only.
        seen = session.exec(["unshare", "-Urm", "sh", "-c", REMOUNT]).text
        assert seen.split()[3].startswith("rw"), seen
        controls = list((shared_server.data / "sandboxes").glob("*/control"))
        assert controls and all(one.stat().st_mode & 0o777 == 0o755 for one in controls), moment
        left = [path.name for one in controls for path in one.iterdir()]
        assert not {"file", "link"} & set(left), moment
        assert [(path, path.stat().st_mode) for path in programs] == before
    session.fork()[0].delete()


CONNECTING = """
import socket, time
full = socket.create_server(("127.0.0.1", 9001), backlog=1)
held = [socket.socket() for _ in range(6)]
for one in held:
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", 9001))
print("connecting", flush=True)
time.sleep(1000)
"""


def test_no_memory_is_kept_with_a_connection_half_made(session: Session) -> None:
    program = session.spawn(["python3", "-c", CONNECTING])
    eventually(lambda: list(program.output(follow=False)))
    with pytest.raises(CaptureRefused):
        session.suspend()
    with pytest.raises(CaptureRefused):
        session.snapshot()
    assert session.snapshot(memory=False).id
    assert session.process(program.id).info.running
    session.process(program.id).kill()
    session.suspend()
    session.resume()
    assert session.exec("echo back").text == "back\n"


# -- what a turn is seen to change ------------------------------------------------------------


def test_a_turn_without_a_change_leaves_no_snapshot_and_what_that_misses(session: Session) -> None:
    def snapshots_of(call: Callable[[], object]) -> int:
        before = len(session.history())
        call()
        return len(session.history()) - before

    counter = session.spawn(["python3", "-c", "n = 0\nwhile True: n += 1"])
    session.history()
    assert snapshots_of(lambda: session.exec(["true"])) == 0, "memory of a process is not looked at"
    assert snapshots_of(lambda: session.exec("echo a > /root/file")) == 1
    assert snapshots_of(lambda: session.exec("echo a > /tmp/file")) == 1
    assert snapshots_of(lambda: session.exec("cat /tmp/file /root/file")) == 0
    assert snapshots_of(lambda: session.exec("chmod 600 /root/file")) == 1
    assert snapshots_of(lambda: session.run_code("n = 1")) == 1
    swap = f"kill -9 {counter.pid}; sleep 1000 > /dev/null 2>&1 &"
    assert snapshots_of(lambda: session.exec(swap)) == 1, "one process went, another came"
    assert snapshots_of(session.snapshot) == 1, "an explicit one is always taken"


def test_a_sandbox_that_ends_leaves_its_files_beside_the_last_snapshot(client: Sojourn) -> None:
    session = client.sessions.create(policy={"auto_snapshot": "off"})
    try:
        session.exec("echo one > /root/file")
        session.snapshot("one")
        session.exec("echo two > /root/file; sync")
        with pytest.raises(SandboxLost):
            session.exec("kill -KILL 1; sleep 60")
        eventually(lambda: session.refresh().state == "suspended")
        assert session.info.cause
        assert session.files.read("/root/file") == b"one\n"
        (kept,) = [one for one in session.history() if (one.label or "").startswith("salvaged-")]
        session.rollback(kept)
        assert session.files.read("/root/file") == b"two\n"
    finally:
        session.delete()
