"""Group B: whatever part is killed or fails, a session comes to rest and says what happened."""

from __future__ import annotations

import array
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpcore
import pytest
import uvloop

from sojourn.client import Session
from sojourn.database import open_database
from sojourn.database.writes import UpdateSession
from sojourn.errors import ResumeFailed, SojournError, StaleEpoch
from sojourn.model import SessionState
from sojourn.node import tools
from support.counting import counting
from support.plain_api import RawApi, raw_api
from support.servers import ServerProcess, eventually, host_processes

COUNT = counting(every=0.02)


def no_sessions(api: RawApi) -> bool:
    return api("GET", "/v1/sessions").body["items"] == []


def counts_without_gap(session: Session) -> bool:
    """Whether the counter of `COUNT` runs on and has lost nothing."""
    seen = session.files.read("/root/count").split()
    eventually(lambda: len(session.files.read("/root/count").split()) > len(seen))
    numbers = [int(line) for line in session.files.read("/root/count").split(b"\n")[:-1]]
    return numbers == list(range(1, len(numbers) + 1))


def parts(server: ServerProcess, part: str) -> list[int]:
    """Host processes of the server's sandboxes: `boot` is the kernel, `gofer` the file server."""
    found = []
    for pid in host_processes(server.data):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if part.encode() in words:
            found.append(pid)
    return found


def nothing_is_left(server: ServerProcess) -> None:
    """No process but the server, no mount, no directory of a sandbox."""
    eventually(lambda: [p for p in host_processes(server.data) if p != server.pid] == [])
    eventually(lambda: list((server.data / "sandboxes").iterdir()) == [])
    assert str(server.data) not in Path("/proc/self/mounts").read_text()


# -- the server is killed -------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["pause.freeze", "resume.thaw", "suspend.seal"])
def test_c14_a_crash_in_a_verb_converges(server: ServerProcess, point: str) -> None:
    """C14: the server dies between the freeze and the commit: the verb's goal is reached after."""
    verb = point.partition(".")[0]
    goal = {"pause": "paused", "resume": "running", "suspend": "suspended"}[verb]
    session = server.client().sessions.create()
    session.spawn(COUNT)
    if verb == "resume":
        session.pause()
    client = server.restart(SOJOURN_CRASH_AT=point)
    session = client.sessions.get(session.id)
    with raw_api(server) as api:
        with suppress(httpcore.RemoteProtocolError, httpcore.ReadError):  # it may die first
            begun = api("POST", f"/v1/sessions/{session.id}/{verb}?wait=0", key="once")
            assert begun.status == 202 or begun.body["state"] == "succeeded"
    server.wait()
    client = server.start()
    session = client.sessions.get(session.id)
    eventually(lambda: session.refresh().info.operation is None and session.state == goal)
    with raw_api(server) as api:
        again = api("POST", f"/v1/sessions/{session.id}/{verb}", key="once")
        assert (again.status, again.body["result"]["state"]) == (200, goal)
        found = api("GET", f"/v1/sessions?state={goal}").body["items"]
        assert [item["id"] for item in found] == [session.id]
    assert counts_without_gap(session)


def test_c23_sessions_survive_the_death_of_the_server(server: ServerProcess) -> None:
    """C23: after kill -9 the list is whole, what ran is adopted, what was paused stays paused."""
    client = server.client()
    running = client.sessions.create(name="running")
    running.spawn(COUNT)
    paused = client.sessions.create(name="paused")
    paused.run_code("answer = 42")
    paused.pause()
    suspended = client.sessions.create(name="suspended")
    suspended.suspend()
    sandboxes = set(parts(server, "boot"))
    client = server.restart()
    assert {(one.name, one.state) for one in client.sessions.list()} == {
        ("running", "running"),
        ("paused", "paused"),
        ("suspended", "suspended"),
    }
    assert set(parts(server, "boot")) == sandboxes
    for name in ("running", "paused", "suspended"):
        assert [one.name for one in client.sessions.list(state=name)] == [name]
    assert counts_without_gap(client.sessions.get("running"))
    assert client.sessions.get("paused").run_code("answer").text == "42"
    assert client.sessions.get("suspended").exec("echo up").text == "up\n"
    for one in client.sessions.list():
        one.delete()
    nothing_is_left(server)


def test_c23_sandboxes_that_died_with_the_server(server: ServerProcess) -> None:
    """C23: server and sandboxes killed together: suspended at the last snapshot, with the cause."""
    client = server.client()
    session = client.sessions.create()
    session.files.write("/root/work", b"kept")
    head = session.snapshot().id
    before = parts(server, "boot") + parts(server, "gofer")
    server.kill()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    client = server.start()
    session = client.sessions.get(session.id)
    assert (session.state, session.head) == ("suspended", head)
    assert session.info.cause
    assert session.files.read("/root/work") == b"kept"


def test_c24_a_crash_in_a_teardown_does_not_block_new_sessions(server: ServerProcess) -> None:
    """C24: the server dies amid deletions; leftovers go, the name is free, creation works."""
    for point in ("delete.commit", "end.rename"):
        client = server.restart(SOJOURN_CRASH_AT=point)
        session = client.sessions.create(name="again")
        session.exec("echo x > /root/x")
        with raw_api(server) as api, suppress(httpcore.RemoteProtocolError, httpcore.ReadError):
            api("DELETE", "/v1/sessions/again?wait=0")
        server.wait()
        client = server.start()
        with raw_api(server) as api:
            eventually(partial(no_sessions, api))
        nothing_is_left(server)
        again = client.sessions.create(name="again")
        assert again.exec("echo up").text == "up\n"
        again.delete()


def test_c24_junk_in_the_data_directory_does_not_keep_a_server_from_starting(
    server: ServerProcess,
) -> None:
    """C24: half-made and foreign things among the sandboxes, even immovable ones, stop nobody."""
    session = server.client().sessions.create()
    session.files.write("/root/work", b"kept")
    server.kill()
    sandboxes = server.data / "sandboxes"
    (sandboxes / "a-file").write_text("junk")
    (sandboxes / "empty").mkdir()
    (sandboxes / "half" / "upper").mkdir(parents=True)
    (sandboxes / "half" / "record.json.new").write_text('{"sandbox": "ha')
    (sandboxes / "bad").mkdir()
    (sandboxes / "bad" / "record.json").write_text("not json")
    (sandboxes / "link").symlink_to("/etc")
    (sandboxes / "old.gone" / "upper").mkdir(parents=True)
    stuck = sandboxes / "stuck"
    stuck.mkdir()
    (stuck / "file").write_text("immovable")
    with immutable(stuck):
        client = server.start()
        assert client.sessions.get(session.id).files.read("/root/work") == b"kept"
        assert client.sessions.create().exec("true").ok
        assert stuck.exists()
        assert not {"a-file", "empty", "half", "bad", "link", "old.gone"} & {
            entry.name for entry in sandboxes.iterdir()
        }
    assert Path("/etc/passwd").exists()
    server.restart()
    eventually(lambda: not stuck.exists())


def test_a_second_server_on_the_same_directory_is_refused(server: ServerProcess) -> None:
    """B: two servers never work on one directory; the second says so and touches nothing."""
    session = server.client().sessions.create()
    second = subprocess.run(
        [sys.executable, "-m", "sojourn.cli.main", "up", "--data", str(server.data)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 117
    assert "host_unfit" in second.stderr and "another server" in second.stderr
    assert "ready" not in second.stdout
    assert session.exec("echo still here").text == "still here\n"
    assert (server.data / "server.json").exists()


@pytest.mark.parametrize("policy", ["adopt", "suspend"])
def test_c26_a_stop_keeps_sessions(server: ServerProcess, policy: str) -> None:
    """C26: SIGTERM leaves or puts away each session as its policy says; all go on afterwards."""
    client = server.client()
    session = client.sessions.create(policy={"on_stop": policy})
    paused = client.sessions.create(policy={"on_stop": policy})
    session.spawn(COUNT)
    paused.run_code("answer = 42")
    paused.pause()
    assert server.stop() == 0
    assert bool(host_processes(server.data)) is (policy == "adopt")
    client = server.start()
    session, paused = client.sessions.get(session.id), client.sessions.get(paused.id)
    if policy == "adopt":
        assert (session.state, paused.state) == ("running", "paused")
    else:
        assert (session.state, paused.state) == ("suspended", "suspended")
    assert counts_without_gap(session)
    assert paused.run_code("answer").text == "42"


# -- parts of a sandbox are killed ----------------------------------------------------------------


@pytest.mark.parametrize("part", ["boot", "gofer"])
@pytest.mark.parametrize("state", ["running", "paused"])
def test_a_killed_sandbox_is_told_and_resumed(server: ServerProcess, part: str, state: str) -> None:
    """C23: kill -9 of a part of a sandbox: suspended at the last snapshot, the cause in record and
    events, and the files it had written since kept beside it."""
    client = server.client()
    session = client.sessions.create(policy={"auto_snapshot": "off"})
    session.files.write("/root/work", b"at the snapshot")
    head = session.snapshot(label="good").id
    session.files.write("/root/work", b"written since")
    if state == "paused":
        session.pause()
    (pid,) = parts(server, part)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: session.refresh().state == "suspended")
    assert session.info.cause
    assert session.head == head
    (lost,) = [event for event in session.events() if event.kind == "sandbox.lost"]
    assert lost.result == "sandbox_lost" and lost.details["cause"]
    salvaged = lost.details["salvaged"]
    assert salvaged in [snapshot.id for snapshot in session.history()]
    assert session.files.read("/root/work") == b"at the snapshot"
    session.rollback(salvaged)
    assert session.files.read("/root/work") == b"written since"
    session.delete()
    nothing_is_left(server)


def test_a_command_on_a_killed_sandbox_fails_typed_and_the_next_one_runs(
    server: ServerProcess,
) -> None:
    """C23: who was waiting for a command is told at once; the next command resumes the session."""
    session = server.client().sessions.create()
    session.files.write("/root/work", b"kept")
    process = session.spawn(["sleep", "600"])
    (pid,) = parts(server, "boot")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SojournError) as failure:
        process.wait(30)
    # Who asks only after the loss was noticed meets the session as it was resumed.
    assert failure.value.code in {"sandbox_lost", "process_not_found"}
    assert session.files.read("/root/work") == b"kept"
    assert session.exec("echo up").text == "up\n"


@pytest.mark.parametrize("verb", ["create", "resume", "rollback", "fork"])
def test_c16_runsc_killed_while_it_starts(server: ServerProcess, verb: str) -> None:
    """C16: kill -9 of the runtime amid a start is a typed failure; the next try works."""
    flag = server.data.parent / "hang"
    wrapper = server.data.parent / "hanging-runsc"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" run "*|*" restore "*) [ ! -e {flag} ] || {{ echo $$ > {flag};'
        " exec sleep 1000; };; esac\n"
        f'exec {tools.runsc_path()} "$@"\n'
    )
    wrapper.chmod(0o755)
    client = server.restart(SOJOURN_RUNSC=str(wrapper))
    session = client.sessions.create(name="first")
    session.files.write("/root/work", b"kept")
    session.snapshot(label="good")
    if verb == "resume":
        session.suspend()
    path, body = {
        "create": ("/v1/sessions", {"name": "second"}),
        "resume": ("/v1/sessions/first/resume", None),
        "rollback": ("/v1/sessions/first/rollback", {"snapshot": "good"}),
        "fork": ("/v1/sessions/first/fork", {"n": 1, "names": ["second"]}),
    }[verb]
    flag.touch()
    with raw_api(server) as api:
        begun = api("POST", f"{path}?wait=0", body)
        assert begun.status == 202
        os.kill(int(eventually(lambda: flag.read_text().strip())), signal.SIGKILL)
        ended = api("GET", f"/v1/operations/{begun.body['id']}?wait=30").body
        assert (ended["state"], ended["error"]["code"]) == ("failed", "resume_failed")
        flag.unlink()
        if verb == "create":
            made = client.sessions.get("second")
            assert made.state == "failed" and made.info.cause
            assert [one.name for one in client.sessions.list(state="failed")] == ["second"]
            assert made.resume().exec("echo up").text == "up\n"
        else:
            assert api("POST", path, body).status < 300
    assert session.files.read("/root/work") == b"kept"
    for one in client.sessions.list():
        one.delete()
    nothing_is_left(server)


# -- failing writes and clean-ups -----------------------------------------------------------------


FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IMMUTABLE_FL = 0x80086601, 0x40086602, 0x10


@contextmanager
def immutable(*paths: Path) -> Iterator[None]:
    """Nothing can be made, changed or removed in these directories, not even by root, wherever
    they are moved to."""
    held: list[tuple[int, int]] = []
    try:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            flags = array.array("i", [0])
            held.append((descriptor, 0))
            try:
                fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, flags)
                fcntl.ioctl(
                    descriptor, FS_IOC_SETFLAGS, array.array("i", [flags[0] | FS_IMMUTABLE_FL])
                )
            except OSError as error:
                pytest.skip(f"this file system has no immutable attribute: {error}")
            held[-1] = (descriptor, flags[0])
        yield
    finally:
        for descriptor, before in held:
            with suppress(OSError):  # it may have been removed
                fcntl.ioctl(descriptor, FS_IOC_SETFLAGS, array.array("i", [before]))
            os.close(descriptor)


def places(server: ServerProcess, name: str) -> Path:
    store = server.data / "store"
    return next((store / "staging").iterdir()) if name == "staging" else store / name


@pytest.mark.parametrize("place", ["staging", "snapshots", "layers"])
def test_c15_a_failing_store_leaves_nothing_frozen(server: ServerProcess, place: str) -> None:
    """C15: when the store refuses a write, the session runs on and the error is typed, or the
    operation is shown as under way until the store takes it; nothing frozen is called running."""
    session = server.client().sessions.create()
    session.spawn(COUNT)
    session.files.write("/root/work", b"kept")
    session.snapshot()
    with raw_api(server) as api, immutable(places(server, place)):
        for verb in ("snapshots", "fork", "suspend"):
            answer = api(
                "POST",
                f"/v1/sessions/{session.id}/{verb}?wait=2",
                None if verb != "fork" else {"n": 1},
            )
            if answer.status == 202:
                assert session.refresh().info.operation == answer.body["id"]
                break
            if answer.status < 300:
                assert verb != "suspend" or session.refresh().state == "suspended"
                continue
            assert answer.code in {"capture_failed", "storage_full", "host_unfit"}, answer
            assert session.refresh().state == "running", verb
            assert session.info.operation is None
            assert session.exec("echo thawed", timeout=10).text == "thawed\n", verb
    eventually(lambda: session.refresh().info.operation is None)
    assert session.files.read("/root/work") == b"kept"
    assert counts_without_gap(session)
    assert session.verify().ok


def test_a_fork_that_the_host_refuses_leaves_no_children(server: ServerProcess) -> None:
    """All of its children or none, also when what failed is a directory of the host."""
    client = server.client()
    session = client.sessions.create()
    session.suspend()
    with immutable(server.data / "sandboxes"):
        with pytest.raises(ResumeFailed):
            session.fork(n=2)
        assert [one.id for one in client.sessions.list()] == [session.id]
        assert session.refresh().state == "suspended"
        with pytest.raises(ResumeFailed):
            session.resume()
    assert session.exec("echo back").text == "back\n"


def test_c17_a_failing_clean_up_does_not_wedge_a_suspend(server: ServerProcess) -> None:
    """C17: what cannot be removed fails no verb; it is removed later."""
    client = server.client()
    session = client.sessions.create()
    session.files.write("/root/work", b"1")
    old = session.snapshot(label="old")
    (sandbox,) = (server.data / "sandboxes").iterdir()
    session.files.write("/root/work", b"2")
    session.snapshot()
    layers = list((server.data / "store" / "layers").iterdir())
    with immutable(sandbox / "control", *layers):
        session.delete_snapshot(old.id)
        assert session.suspend().state == "suspended"
        assert session.files.read("/root/work") == b"2"
        assert session.suspend().state == "suspended"
        assert client.sessions.create().exec("true").ok
    assert session.resume().files.read("/root/work") == b"2"
    server.restart()
    eventually(lambda: not list((server.data / "sandboxes").glob(f"{sandbox.name}*")))


# -- placements -----------------------------------------------------------------------------------


def test_c19_a_stale_owner_is_refused(server: ServerProcess) -> None:
    """C19: whoever acts for an earlier placement of a session can neither commit nor reach the
    newer sandbox."""
    client = server.client()
    session = client.sessions.create()
    first = session.info.epoch
    session.suspend()
    session.resume()
    session.rollback(session.snapshot())
    assert session.refresh().info.epoch >= first + 2
    server.stop()

    async def late() -> None:
        database = await open_database(server.data / "sojourn.db")
        try:
            now = await database.get_session(None, session.id)
            for epoch in (first, now.epoch - 1):
                for changes in (
                    {"state": SessionState.SUSPENDED, "sandbox": None},
                    {"epoch": epoch + 1, "sandbox": "sbx-late"},
                    {"head": now.head},
                ):
                    with pytest.raises(StaleEpoch):
                        await database.commit(
                            [
                                UpdateSession(
                                    id=session.id,
                                    expect_state=set(SessionState),
                                    expect_epoch=epoch,
                                    changes=changes,
                                )
                            ]
                        )
            after = await database.get_session(None, session.id)
            assert after == now
        finally:
            await database.close()

    uvloop.run(late())
    client = server.start()
    assert client.sessions.get(session.id).exec("echo up").text == "up\n"


# -- deadlines ------------------------------------------------------------------------------------


def test_c21_a_renewed_deadline_holds(server: ServerProcess) -> None:
    """C21: renewing in the moment of expiry either holds or finds the session put away; after an
    answer that shows a later deadline it is never put away before."""
    client = server.client()
    sessions = [client.sessions.create(policy={"idle_timeout": 1.0}) for _ in range(3)]
    end = time.monotonic() + 4
    promised: dict[str, float] = {}
    while time.monotonic() < end:
        for session in sessions:
            deadline = session.refresh().info.idle_deadline
            if deadline is None:
                assert promised.get(session.id, 0.0) <= time.time()
                assert session.state == "suspended"
                session.resume()
                promised[session.id] = session.info.idle_deadline or 0.0
                continue
            # Wait for the last moment, then renew.
            time.sleep(max(0.0, min(deadline - time.time() - 0.002, 0.3)))
            if session.keep_alive(0.7).info.idle_deadline is not None:
                promised[session.id] = session.info.idle_deadline or 0.0
    for session in sessions:
        eventually(lambda session=session: session.refresh().state == "suspended")
        session.delete()
    nothing_is_left(server)


def test_c21_deadlines_outlive_the_server(server: ServerProcess) -> None:
    """C21: kill -9 does not make a session immortal: idle time and lifetime count on."""
    client = server.client()
    idle = client.sessions.create(name="idle", policy={"idle_timeout": 2.0})
    ends = client.sessions.create(
        name="ends", policy={"max_lifetime": 2.0, "on_expiry": "suspend", "idle_timeout": None}
    )
    gone = client.sessions.create(
        name="gone", policy={"max_lifetime": 2.0, "on_expiry": "delete", "idle_timeout": None}
    )
    stays = client.sessions.create(name="stays", policy={"idle_timeout": None})
    ends.run_code("answer = 42")
    gone.pause()
    before = {one.name: (one.info.lifetime_deadline) for one in client.sessions.list()}
    client = server.restart()
    after = {one.name: (one.info.lifetime_deadline) for one in client.sessions.list()}
    assert {name: before[name] for name in after} == after
    eventually(lambda: client.sessions.get(idle.id).state == "suspended")
    eventually(lambda: client.sessions.get(ends.id).state == "suspended")
    eventually(lambda: "gone" not in {one.name for one in client.sessions.list()})
    assert client.sessions.get(stays.id).state == "running"
    # A lifetime that is over is over once: who resumes it is not cut off again.
    session = client.sessions.get(ends.id)
    assert session.run_code("answer").text == "42"
    time.sleep(1.2)
    assert session.refresh().state == "running"
    assert gone.id not in [one.id for one in client.sessions.list()]


def test_c21_a_suspended_session_is_deleted_at_the_end_of_its_life(server: ServerProcess) -> None:
    """C21: on_expiry `delete` also reaps what was put away, and what failed."""
    session = server.client().sessions.create(policy={"max_lifetime": 1.5, "on_expiry": "delete"})
    session.suspend()
    with raw_api(server) as api:
        eventually(lambda: api("GET", f"/v1/sessions/{session.id}").status == 404)
    nothing_is_left(server)
