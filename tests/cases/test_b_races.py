"""Group B: whatever comes at once or in between, a session ends in a stable state, never stuck."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import (
    IdempotencyMismatch,
    NameTaken,
    SessionNotFound,
    SojournError,
)
from support.plain_api import RawApi, raw_api
from support.servers import ServerProcess, eventually

STABLE = {"running", "paused", "suspended"}
CONFLICTS = {"session_busy", "wrong_state", "session_not_found", "interrupted", "conflict"}


def at_rest(session: Session) -> bool:
    return session.refresh().info.operation is None and session.state in STABLE


def test_c11_a_resume_right_after_a_pause_counts(
    shared_server: ServerProcess, session: Session
) -> None:
    """C11: 100 pauses and resumes sent without waiting: it runs afterwards, or says conflict."""
    with raw_api(shared_server) as api:
        for _ in range(50):
            paused = api("POST", f"/v1/sessions/{session.id}/pause?wait=0")
            assert paused.status in (200, 202), paused
            resumed = api("POST", f"/v1/sessions/{session.id}/resume")
            assert resumed.status == 200, resumed
            assert resumed.body["result"]["state"] == "running"
            assert session.refresh().state == "running"
        for _ in range(50):
            both = api.parallel(
                [
                    ("POST", f"/v1/sessions/{session.id}/pause"),
                    ("POST", f"/v1/sessions/{session.id}/resume"),
                ]
            )
            for answer in both:
                assert answer.status == 200 or answer.code in CONFLICTS, answer
        assert api("POST", f"/v1/sessions/{session.id}/resume").status == 200
    assert session.exec("echo here").text == "here\n"


def test_c11_a_command_while_pausing_runs(session: Session) -> None:
    """C11: commands sent while others pause and suspend are never lost silently: each one ran or
    raised a typed error."""
    stop = threading.Event()

    def put_away() -> None:
        chooser = random.Random(11)
        while not stop.is_set():
            try:
                chooser.choice((session.pause, session.suspend))()
            except SojournError as error:
                assert error.code in CONFLICTS, error

    other = threading.Thread(target=put_away)
    other.start()
    wrote: list[int] = []
    unsure: list[int] = []
    try:
        for number in range(25):
            try:
                result = session.exec(f"echo {number} >> /root/log")
                assert result.exit_code == 0
                wrote.append(number)
            except SojournError as error:
                assert error.code in CONFLICTS, error
                unsure.append(number)
    finally:
        stop.set()
        other.join()
    logged = [int(line) for line in session.files.read("/root/log").split()]
    assert len(logged) == len(set(logged))
    assert set(wrote) <= set(logged) <= set(wrote) | set(unsure)
    assert session.exec("echo calm").text == "calm\n"


def verbs_at_once(api: RawApi, session: str, seed: int) -> None:
    """A storm of verbs; each ends in success or a typed conflict."""
    chooser = random.Random(seed)
    verbs = ["pause", "resume", "suspend", "snapshots", "exec", "get"]

    def one(verb: str) -> None:
        path = f"/v1/sessions/{session}"
        if verb == "get":
            answer = api("GET", path)
        elif verb == "exec":
            answer = api("POST", f"{path}/exec", {"shell": "echo $((1+1)) >> /root/x"})
        else:
            answer = api("POST", f"{path}/{verb}")
        assert answer.status < 300 or answer.code in CONFLICTS, (verb, answer)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, chooser.choices(verbs, k=40)))


def test_c11_a_storm_of_verbs_comes_to_rest(shared_server: ServerProcess, session: Session) -> None:
    """C11: pause, resume, suspend, snapshot and exec all at once: a stable state, and it works."""
    with raw_api(shared_server) as api:
        verbs_at_once(api, session.id, 1)
    eventually(lambda: at_rest(session))
    assert session.exec("echo fine").text == "fine\n"
    assert session.verify().ok


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_c13_delete_in_a_storm(shared_server: ServerProcess, client: Sojourn, seed: int) -> None:
    """C13: a delete amid a storm of verbs answers 204 and ends it for everyone."""
    session = client.sessions.create()
    with raw_api(shared_server) as api, ThreadPoolExecutor(1) as threads:
        storm = threads.submit(verbs_at_once, api, session.id, seed)
        time.sleep(0.1 * seed)
        assert api("DELETE", f"/v1/sessions/{session.id}").status == 204
        storm.result()
        assert api("GET", f"/v1/sessions/{session.id}").status == 404
    with pytest.raises(SessionNotFound):
        session.exec("true")


@pytest.mark.parametrize("state", ["running", "paused", "suspended"])
def test_c13_deleted_from_every_state_and_nothing_is_left(
    server: ServerProcess, state: str
) -> None:
    """C13: DELETE answers 204 in every state; processes, directories and disk space are freed."""
    client = server.client()
    client.sessions.create().delete()
    empty = eventually(lambda: settled_store(server))
    session = client.sessions.create()
    session.exec("head -c 20000000 /dev/urandom > /root/big; sleep 600 &")
    if state == "paused":
        session.pause()
    if state == "suspended":
        session.suspend()
    with raw_api(server) as api:
        assert api("GET", f"/v1/sessions?state={state}").body["items"][0]["id"] == session.id
        assert api("DELETE", f"/v1/sessions/{session.id}").status == 204
        assert api("DELETE", f"/v1/sessions/{session.id}").status == 404
        assert api("GET", f"/v1/sessions?state={state}").body["items"] == []
    assert client.status().sandboxes == 0
    assert sandbox_processes(server) == []
    eventually(lambda: list((server.data / "sandboxes").iterdir()) == [])
    eventually(lambda: client.status().store_bytes <= empty + 1_000_000)


def settled_store(server: ServerProcess) -> int:
    """Bytes of the store when they have stopped changing."""
    client = server.client()
    before = client.status().store_bytes
    time.sleep(0.2)
    return before if client.status().store_bytes == before else 0


def sandbox_processes(server: ServerProcess) -> list[int]:
    """Host processes of this server's sandboxes."""
    from support.servers import host_processes

    return [pid for pid in host_processes(server.data) if pid != server.pid]


# -- hung and killed starts -----------------------------------------------------------------------


def hanging_runsc(server: ServerProcess) -> str:
    """A runsc whose starts and restores hang as long as the file `hang` is there."""
    from sojourn.node.tools import runsc_path

    flag = server.data.parent / "hang"
    wrapper = server.data.parent / "hanging-runsc"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" run "*|*" restore "*) [ ! -e {flag} ] || sleep 1000;; esac\n'
        f'exec {runsc_path()} "$@"\n'
    )
    wrapper.chmod(0o755)
    return str(wrapper)


def hung(server: ServerProcess) -> list[int]:
    """The processes of starts that hang."""
    return [
        pid
        for pid in sandbox_processes(server)
        if b"hanging-runsc" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.fixture
def hanging(server: ServerProcess) -> ServerProcess:
    """A server whose starts can be made to hang."""
    server.restart(SOJOURN_RUNSC=hanging_runsc(server), SOJOURN_STOP_SECONDS="1")
    return server


def set_hang(server: ServerProcess, on: bool) -> None:
    flag = server.data.parent / "hang"
    flag.touch() if on else flag.unlink(missing_ok=True)


def test_c16_deleted_while_a_start_hangs(hanging: ServerProcess) -> None:
    """C16: a session can be deleted while its creation, resume, rollback or fork hangs."""
    client = hanging.client()
    with raw_api(hanging) as api:

        def delete_quickly(id: str) -> None:
            started = time.monotonic()
            assert api("DELETE", f"/v1/sessions/{id}").status == 204
            assert time.monotonic() - started < 20  # a hung start is given a minute
            eventually(lambda: not hung(hanging))
            assert api("GET", f"/v1/sessions/{id}").status == 404

        set_hang(hanging, True)
        begun = api("POST", "/v1/sessions?wait=0", {"name": "stuck"})
        assert begun.status == 202
        assert api("GET", "/v1/sessions?state=creating").body["items"][0]["name"] == "stuck"
        eventually(lambda: hung(hanging))
        delete_quickly("stuck")
        ended = api("GET", f"/v1/operations/{begun.body['id']}?wait=10").body
        assert ended["state"] == "failed" and ended["error"]["code"] == "interrupted"
        # The same, in the very first moment.
        begun = api("POST", "/v1/sessions?wait=0", {"name": "stuck"})
        delete_quickly(begun.body["session"])

        for verb, body in (
            ("resume", None),
            ("rollback", {"snapshot": "good"}),
            ("fork", {"n": 2, "names": ["left", "right"]}),
            ("exec", {"argv": ["true"]}),
        ):
            set_hang(hanging, False)
            session = client.sessions.create(name="stuck")
            session.snapshot(label="good")
            if verb in ("resume", "exec"):
                session.suspend()
            set_hang(hanging, True)
            with ThreadPoolExecutor(1) as threads:
                answer = threads.submit(api, "POST", f"/v1/sessions/stuck/{verb}", body)
                eventually(lambda: hung(hanging))
                delete_quickly(session.id)
                assert answer.result().code in CONFLICTS | {"resume_failed"}, answer.result()
            eventually(lambda: api("GET", "/v1/sessions").body["items"] == [])
    assert client.status().sandboxes == 0


def test_c16_a_child_deleted_while_its_fork_hangs(hanging: ServerProcess) -> None:
    """C16: a fork is all or none; its source goes on, and names are free again."""
    client = hanging.client()
    source = client.sessions.create(name="source")
    set_hang(hanging, True)
    with raw_api(hanging) as api, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(
            api, "POST", "/v1/sessions/source/fork", {"n": 2, "names": ["left", "right"]}
        )
        eventually(lambda: len(hung(hanging)) >= 1)
        assert api("DELETE", "/v1/sessions/left").status == 204
        assert answer.result().status >= 400
        set_hang(hanging, False)
        names = {item["name"] for item in api("GET", "/v1/sessions").body["items"]}
        assert names == {"source"}
    assert {child.name for child in source.fork(n=2, names=["left", "right"])} == {"left", "right"}


def test_a_stop_does_not_wait_for_a_hung_start(hanging: ServerProcess) -> None:
    """B: SIGTERM while a start hangs ends the server; the next one finishes the creation."""
    set_hang(hanging, True)
    with raw_api(hanging) as api:
        begun = api("POST", "/v1/sessions?wait=0", {"name": "late"})
        eventually(lambda: hung(hanging))
    assert hanging.stop() == 0
    assert not [pid for pid in sandbox_processes_of_stopped(hanging)]
    set_hang(hanging, False)
    client = hanging.start()
    session = eventually(lambda: client.sessions.get("late"))
    eventually(lambda: session.refresh().state == "running")
    assert client.operation(begun.body["id"]).state == "succeeded"
    assert session.exec("echo up").text == "up\n"


def sandbox_processes_of_stopped(server: ServerProcess) -> list[int]:
    from support.servers import host_processes

    return host_processes(server.data)


# -- idempotency ----------------------------------------------------------------------------------


def test_c25_one_key_makes_one_session(server: ServerProcess) -> None:
    """C25: ten creations with one key at once are one session; another body is a conflict."""
    client = server.client()
    with raw_api(server) as api:
        body = {"name": "once", "labels": {"a": "b"}}
        answers = api.parallel([("POST", "/v1/sessions", body)] * 10, key="key-1")
        assert {answer.status for answer in answers} == {201}
        assert len({answer.body["result"]["id"] for answer in answers}) == 1
        assert len(client.sessions.list()) == 1
        for other in ({"name": "once"}, {"name": "twice", "labels": {"a": "b"}}, {}):
            answer = api("POST", "/v1/sessions", other, key="key-1")
            assert (answer.status, answer.code) == (409, "idempotency_mismatch"), other
        assert len(client.sessions.list()) == 1
        # Also a later server knows the key.
        server.restart()
    with raw_api(server) as api:
        again = api("POST", "/v1/sessions", body, key="key-1")
        assert (again.status, again.body["result"]["id"]) == (201, answers[0].body["result"]["id"])
        # A key belongs to one request, whatever the verb.
        crossed = api("POST", "/v1/sessions/once/pause", key="key-1")
        assert crossed.code == "idempotency_mismatch"
    client = server.client()
    first = client.sessions.create(idempotency_key="sdk")
    assert client.sessions.create(idempotency_key="sdk").id == first.id
    with pytest.raises(IdempotencyMismatch):
        client.sessions.create(idempotency_key="sdk", env={"A": "1"})


def test_c25_one_key_does_a_verb_once(shared_server: ServerProcess, session: Session) -> None:
    """C25: each verb sent ten times at once with one key happens once and answers alike."""
    path = f"/v1/sessions/{session.id}"
    with raw_api(shared_server) as api:
        for verb, body in (
            ("snapshots", {"label": "one"}),
            ("fork", {"n": 1, "names": [f"child-{session.id[4:]}"], "start": False}),
            ("pause", None),
            ("resume", None),
            ("suspend", {"memory": True}),
            ("rollback", {"snapshot": "one"}),
        ):
            key = f"{session.id}-{verb}"
            answers = api.parallel([("POST", f"{path}/{verb}", body)] * 10, key=key)
            assert {answer.status for answer in answers} <= {200, 201}, (verb, answers)
            assert len({answer.body["id"] for answer in answers}) == 1, verb
        kinds = [event["kind"] for event in api("GET", f"{path}/events").body]
        for kind in ("snapshot", "fork", "pause", "resume", "suspend", "rollback"):
            assert kinds.count(kind) == 1, (kind, kinds)
        children = [
            item["id"]
            for item in api("GET", "/v1/sessions").body["items"]
            if item["parent_session"] == session.id
        ]
        assert len(children) == 1
        changed = api("POST", f"{path}/snapshots", {"label": "two"}, key=f"{session.id}-snapshots")
        assert changed.code == "idempotency_mismatch"
        for child in children:
            key = f"{child}-delete"
            answers = api.parallel([("DELETE", f"/v1/sessions/{child}")] * 10, key=key)
            assert {answer.status for answer in answers} == {204}, answers
            assert api("DELETE", f"/v1/sessions/{child}", key=key).status == 204
            assert api("DELETE", f"/v1/sessions/{child}", key=key + "2").status == 404
            crossed = api("DELETE", path, key=key)
            assert crossed.code == "idempotency_mismatch"


def test_c25_deletes_at_once_without_keys(client: Sojourn, shared_server: ServerProcess) -> None:
    """C25: of many deletes at once none reports that it was cut short by another."""
    session = client.sessions.create()
    with raw_api(shared_server) as api:
        answers = api.parallel([("DELETE", f"/v1/sessions/{session.id}")] * 8)
    assert {answer.status for answer in answers} <= {204, 404}
    assert 204 in {answer.status for answer in answers}


def test_c25_names_are_unique_and_free_after_a_delete(client: Sojourn) -> None:
    """C25: of ten creations of one name at once one wins; deleted, the name is free again."""

    def create(_: int) -> Session | str:
        try:
            return client.sessions.create(name="only")
        except NameTaken as error:
            return error.code

    with ThreadPoolExecutor(10) as threads:
        made = list(threads.map(create, range(10)))
    sessions = [one for one in made if isinstance(one, Session)]
    assert len(sessions) == 1 and made.count("name_taken") == 9
    with pytest.raises(NameTaken):
        sessions[0].fork(n=1, names=["only"])
    sessions[0].delete()
    again = client.sessions.create(name="only")
    assert again.id != sessions[0].id
    again.update(name=None)
    third = client.sessions.create(name="only")
    with pytest.raises(NameTaken):
        again.update(name="only")
    again.delete()
    third.delete()
