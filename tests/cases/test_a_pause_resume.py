"""Group A: a session that was paused or put away comes back as it was, for as long as promised."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import ResumeFailed, SojournError, WrongState
from support.plain_api import raw_api
from support.servers import ServerProcess, eventually

SERVE = """
import http.server
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"up")
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", 3000), Answer).serve_forever()
"""
FETCH = [
    "python3",
    "-c",
    "import urllib.request as u; print(u.urlopen('http://127.0.0.1:3000', timeout=5).read())",
]


def listed(session: Session) -> dict[int, bool]:
    """Process numbers inside the session, and whether they run."""
    return {process.pid: process.running for process in session.processes()}


def test_c1_edits_after_earlier_pauses_are_kept(session: Session) -> None:
    """C1: what is written between any two of 20 pauses is there at the end, under one id."""
    identity = session.id
    for round in range(20):
        session.files.write("/root/last", str(round))
        session.exec(
            ["sh", "-c", f"echo {round} >> /root/all; mkdir -p /tmp/m; echo {round} > /tmp/m/last"]
        )
        session.pause()
        assert session.refresh().state == "paused"
        session.resume()
        assert session.files.read("/root/last") == str(round).encode()
        assert session.files.read("/tmp/m/last") == f"{round}\n".encode()
    assert session.files.read("/root/all").split() == [str(n).encode() for n in range(20)]
    assert session.refresh().id == identity


@pytest.mark.parametrize("memory", [True, False])
def test_c1_edits_after_earlier_suspensions_are_kept(session: Session, memory: bool) -> None:
    """C1, put away to disk: overwritten, appended, removed and renamed files are the newest."""
    for round in range(3):
        session.files.write("/root/last", str(round))
        session.exec(
            f"echo {round} >> /root/all; rm -f /root/gone-{round - 1}; touch /root/gone-{round};"
            f" mv /root/name-{round - 1} /root/name-{round} || echo x > /root/name-{round}"
        )
        session.suspend(memory=memory)
        names = {Path(file.path).name for file in session.files.list("/root")}
        assert session.files.read("/root/last") == str(round).encode()
        assert {f"gone-{round}", f"name-{round}"} <= names
        assert not {f"gone-{round - 1}", f"name-{round - 1}"} & names
    assert session.files.read("/root/all").split() == [b"0", b"1", b"2"]
    assert session.files.read("/root/name-2") == b"x\n"


def test_c3_connecting_never_shortens_a_deadline(client: Sojourn, session: Session) -> None:
    """C3: looking, keeping alive for less, calling and resuming leave a far deadline alone."""
    session.update(policy={"idle_timeout": 1800.0})
    far = session.refresh().info.idle_deadline
    assert far is not None and far > time.time() + 1790
    session.keep_alive(7200)
    far = session.refresh().info.idle_deadline
    assert far is not None and far > time.time() + 7190

    def unshortened(what: str) -> None:
        now = client.sessions.get(session.id).info.idle_deadline
        assert now is not None and now >= far, what

    client.sessions.get(session.id)
    unshortened("get")
    session.keep_alive(1)
    assert session.info.idle_deadline is not None and session.info.idle_deadline >= far
    unshortened("keep_alive")
    session.exec("true")
    unshortened("exec")
    session.pause()
    unshortened("pause")
    session.resume()
    unshortened("resume")
    session.resume()
    unshortened("resume of a running one")
    session.update(labels={"a": "b"})
    unshortened("update of something else")
    session.snapshot()
    unshortened("snapshot")


def test_c3_a_call_moves_the_deadline_out_and_every_answer_shows_it(
    client: Sojourn, session: Session
) -> None:
    """C3: the deadline that is shown is the one that counts, in get, list and verbs."""
    session.update(policy={"idle_timeout": 1800.0})
    before = session.info.idle_deadline
    assert before is not None
    session.exec("sleep 0.1")
    shown = client.sessions.get(session.id).info.idle_deadline
    assert shown is not None and shown >= before + 0.1
    (in_list,) = [one for one in client.sessions.list() if one.id == session.id]
    assert in_list.info.idle_deadline is not None and in_list.info.idle_deadline >= shown
    resumed = session.resume().info.idle_deadline
    assert resumed is not None and resumed >= shown


def damage_images(server: ServerProcess) -> list[tuple[Path, bytes]]:
    """Overwrite the head of each memory image; what is needed to mend them."""
    kept = []
    for path in sorted((server.data / "store").rglob("pages.img")):
        content = path.read_bytes()
        kept.append((path, content))
        path.write_bytes(b"\xff" * 65536 + content[65536:])
    assert kept
    return kept


def test_c5_a_failed_resume_leaves_the_session_as_it_was(server: ServerProcess) -> None:
    """C5: when starting fails, the session stays put away with its lifetime; a later try works."""
    client = server.client()
    session = client.sessions.create(policy={"idle_timeout": 600.0, "max_lifetime": 3600.0})
    lifetime = session.info.lifetime_deadline
    session.files.write("/root/work", b"kept")
    session.suspend()
    client = server.restart(SOJOURN_RUNSC=broken_runsc(server))
    session = client.sessions.get(session.id)
    for attempt in (session.resume, lambda: session.exec("true")):
        with pytest.raises(SojournError) as failure:
            attempt()
        assert isinstance(failure.value, ResumeFailed), failure.value
        assert session.refresh().state == "suspended"
        assert session.info.lifetime_deadline == lifetime
        assert session.info.operation is None
    assert client.status().sandboxes == 0
    failures = [event for event in session.events() if event.kind == "resume"]
    assert [event.result for event in failures] == ["resume_failed", "resume_failed"]
    client = server.restart()
    session = client.sessions.get(session.id)
    assert session.files.read("/root/work") == b"kept"
    assert session.refresh().info.lifetime_deadline == lifetime
    idle = session.info.idle_deadline
    assert idle is not None and idle <= time.time() + 601


def broken_runsc(server: ServerProcess) -> str:
    """A runsc that knows its version and can do nothing else."""
    from sojourn.node.tools import runsc_path

    wrapper = server.data.parent / "runsc"
    wrapper.write_text(
        '#!/bin/sh\ncase " $* " in *" run "*|*" restore "*) exit 3;; esac\n'
        f'exec {runsc_path()} "$@"\n'
    )
    wrapper.chmod(0o755)
    return str(wrapper)


def test_c5_damaged_memory_fails_the_session_with_a_way_back(server: ServerProcess) -> None:
    """C5: a session whose image is bad says `failed` and why; it can be rolled back or deleted."""
    client = server.client()
    session = client.sessions.create()
    session.files.write("/root/work", b"kept")
    files_only = session.snapshot(label="good", memory=False)
    session.suspend()
    damage_images(server)
    with pytest.raises(SojournError) as failure:
        session.resume()
    assert failure.value.code == "integrity_error"
    assert session.refresh().state == "failed"
    assert session.info.cause
    assert failure.value.details["last_good"] == files_only.id
    with pytest.raises(WrongState):
        session.exec("true")
    with raw_api(server) as api:
        found = api("GET", "/v1/sessions?state=failed").body["items"]
    assert [item["id"] for item in found] == [session.id]
    session.rollback("good")
    assert session.files.read("/root/work") == b"kept"


def test_c6_a_paused_session_past_its_idle_time_is_put_away_and_resumes(
    server: ServerProcess,
) -> None:
    """C6: paused for longer than the idle time, a session is put away whole, and resumes."""
    session = server.client().sessions.create(policy={"idle_timeout": 1.0})
    session.exec("echo kept > /root/work")
    session.run_code("answer = 42")
    session.pause()
    eventually(lambda: session.refresh().state == "suspended")
    assert session.info.idle_deadline is None
    assert session.run_code("answer").text == "42"
    assert session.files.read("/root/work") == b"kept\n"
    # The deadline survives a crash, and one that came meanwhile is acted on.
    session.pause()
    server.kill()
    time.sleep(1.2)
    session = server.start().sessions.get(session.id)
    eventually(lambda: session.refresh().state == "suspended")
    assert session.run_code("answer").text == "42"


def test_c6_a_long_call_is_not_idle(server: ServerProcess) -> None:
    """C6: a session at work past its idle time is not put away under the caller's hands."""

    def called(session: Session) -> None:
        assert session.exec("sleep 3.5; echo done").text == "done\n"

    def spawned(session: Session) -> None:
        process = session.spawn("sleep 3.5; echo over")
        assert b"".join(piece.data for piece in process.output()) == b"over\n"
        assert process.wait(30).exit_code == 0

    def fed(session: Session) -> None:
        done = session.exec("sleep 3.5; wc -c", stdin=iter([b"x" * 100]))
        assert done.text.strip() == "100"

    def run(work: Callable[[Session], None]) -> None:
        with server.client() as client:
            session = client.sessions.create(policy={"idle_timeout": 2.0})
            work(session)
            assert "suspend" not in [event.kind for event in session.events()]
            eventually(lambda: session.refresh().state == "suspended")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, (called, spawned, fed)))


@pytest.mark.parametrize("how", ["pause", "suspend", "idle"])
def test_c8_processes_are_listed_and_killable_after_waking(client: Sojourn, how: str) -> None:
    """C8: a server started before the session slept is listed, answers, and can be killed."""
    session = client.sessions.create(policy={"idle_timeout": 1.0} if how == "idle" else None)
    try:
        session.files.write("/root/serve.py", SERVE)
        process = session.spawn(["python3", "/root/serve.py"])
        eventually(lambda: session.exec(FETCH).exit_code == 0)
        if how == "idle":
            eventually(lambda: session.refresh().state == "suspended")
            session.update(policy={"idle_timeout": 600.0})
        else:
            getattr(session, how)()
        assert listed(session)[process.pid] is True
        assert session.exec(FETCH).text == "b'up'\n"
        session.process(process.id).kill()
        assert session.process(process.id).wait(10).exit_code == 137
        assert session.exec(FETCH).exit_code != 0
        assert listed(session).get(process.pid, False) is False
    finally:
        session.delete()


def test_c8_killed_by_its_number_after_waking(session: Session) -> None:
    """C8: a command of the session itself can end what ran before; the list shows how it ended."""
    process = session.spawn(["sleep", "600"])
    session.suspend()
    assert session.exec(["kill", str(process.pid)]).exit_code == 0
    assert session.process(process.id).wait(10).signal == 15


def environment_everywhere(session: Session, name: str) -> dict[str, str]:
    """A variable as each way of running something sees it."""
    spawned = session.spawn(["sh", "-c", f'echo "${name}"'])
    terminal = session.spawn(["sh", "-c", f'echo "${name}"'], pty=(24, 80))
    code = session.run_code(f"import os; os.environ.get({name!r})")
    return {
        "shell": session.exec(f'echo "${name}"').text.strip(),
        "argv": session.exec(["printenv", name]).text.strip(),
        "spawn": b"".join(piece.data for piece in spawned.output()).decode().strip(),
        "pty": b"".join(piece.data for piece in terminal.output()).decode().strip(),
        "code": json.loads((code.text or "null").replace("'", '"')),
    }


def test_c10_the_environment_of_creation_is_everywhere_and_lasts(client: Sojourn) -> None:
    """C10: `env` of creation is in exec, spawn, terminals and code, whatever happened since."""
    value = "a b$c=ü"
    session = client.sessions.create(env={"A": value})
    forks: list[Session] = []
    try:

        def everywhere(one: Session, when: str) -> None:
            seen = environment_everywhere(one, "A")
            assert seen == dict.fromkeys(seen, value), when

        everywhere(session, "at first")
        start = session.snapshot(label="start")
        session.pause()
        everywhere(session, "after a pause")
        session.suspend()
        everywhere(session, "after a suspension")
        session.suspend(memory=False)
        everywhere(session, "after files only")
        forks = session.fork(n=1)
        everywhere(forks[0], "in a fork")
        session.rollback(start)
        everywhere(session, "after a rollback")
        assert session.exec('echo "$A"', env={"A": "mine"}).text == "mine\n"
        assert session.exec('echo "$A"').text.strip() == value
    finally:
        for one in [*forks, session]:
            one.delete()


def test_warm_pause_and_resume_a_hundred_times(session: Session) -> None:
    """C1, C11: a hundred pauses and resumes in a row, and the process inside never noticed."""
    session.files.write("/root/n", b"0")
    process = session.spawn(
        ["perl", "-e", '$| = 1; for (;;) { print ++$i, "\\n"; select undef, undef, undef, 0.01 }']
    )
    for _ in range(100):
        assert session.pause().state == "paused"
        assert session.resume().state == "running"
    process.kill()
    counted = [int(line) for line in b"".join(p.data for p in process.output()).split()]
    assert counted == list(range(1, len(counted) + 1))
