"""A crash of the server at every named point converges: what was acknowledged is there, the
session rests within seconds, the same request with the same key reaches its goal, and nothing is
left on the machine."""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import http.client
import io
import itertools
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import sojourn
from sojourn.client import Session, Sojourn
from sojourn.errors import SessionNotFound
from sojourn.lifecycle import Verb
from sojourn.server.branches import Branches
from sojourn.server.verbs import Verbs
from support.counting import COUNTER
from support.durable import REPLICATION_POINTS  # tests/faults/test_replication_crashes.py
from support.histories_machine import Machine, await_true
from support.images import MadeImage, layer, member
from support.node_process import MIGRATION_POINTS  # tests/faults/test_node_crashes.py
from support.servers import ServerProcess, eventually

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("small_template"),
]

REST_SECONDS = 10.0
STABLE = {"running", "paused", "suspended"}
APPEND = "echo $(($(cat /root/log 2>/dev/null | wc -l) + 1)) >> /root/log"
_keys = itertools.count()

Answer = tuple[int, Any]


def call(server: ServerProcess, method: str, path: str, body: Any, key: str) -> Answer | None:
    """One request; None when the server went away before it answered."""
    address = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    headers = {
        "authorization": f"Bearer {server.token}",
        "idempotency-key": key,
        "content-type": "application/json",
    }
    try:
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, sent, headers)
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return answer.status, json.loads(text) if text else None


class World:
    """A session with files, a variable and a process that counts, and a log of what was
    acknowledged."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.machine = Machine(server)
        self.client: Sojourn = server.client()
        self.key = f"crash-{next(_keys)}"
        self.acked = 0
        self.sent = 0
        self.session: Session
        self.child: Session | None = None
        self.snapshot = ""
        self.acked_then = 0

    def prepare(self, **options: Any) -> None:
        self.session = self.client.sessions.create(**options)
        self.session.spawn(COUNTER)
        assert self.session.run_code("value = 41; value").text == "41"
        self.append()

    def again(self) -> None:
        """The session as it is now is what the next crash meets, the others are gone."""
        for session in self.client.sessions.list():
            if session.id != self.session.id:
                session.delete()
        self.child = None
        self.key = f"crash-{next(_keys)}"
        lines = self.session.files.read("/root/log").split()
        self.acked = self.sent = len(lines)

    def append(self) -> None:
        """A write to file and variable, noted once both are acknowledged."""
        self.sent += 1
        result = self.session.exec(APPEND)
        assert result.exit_code == 0, result
        self.acked += 1

    def mark(self) -> None:
        """A snapshot to go back to; work goes on after it."""
        self.snapshot = self.session.snapshot(f"mark-{self.key}").id
        self.acked_then = self.acked
        self.append()

    def reconnect(self) -> None:
        self.client.close()
        self.client = self.server.client()
        if hasattr(self, "session"):
            with contextlib.suppress(SessionNotFound):  # a deletion had gone through
                self.session = self.client.sessions.get(self.session.id)
        if self.child is not None:
            self.child = self.client.sessions.get(self.child.id)

    def check(self, session: Session, most: int | None = None, least: int | None = None) -> None:
        """Files, variable and counter are those that were acknowledged."""
        lines = session.files.read("/root/log").decode().split()
        assert lines == [str(n + 1) for n in range(len(lines))]
        assert (self.acked if least is None else least) <= len(lines)
        assert len(lines) <= (self.sent if most is None else most)
        assert session.run_code("value").text == "41"
        before = counted(session)
        eventually(lambda: counted(session) > before)


def counted(session: Session) -> int:
    """How far the counter is; its log must have neither gap nor repetition."""
    lines = session.files.read("/root/count").decode().split("\n")[:-1]
    assert lines == [str(n + 1) for n in range(len(lines))]
    return len(lines)


def path(session: Session, verb: str) -> str:
    return f"/v1/sessions/{session.id}/{verb}"


# -- operations: what is prepared, what is asked, what must be true afterwards ---------------------


class Operation:
    """One verb: `prepare`, then `request` until it is answered, then `goal`."""

    method, verb = "POST", ""
    body: dict[str, Any] | None = None
    answers: tuple[int, ...] = (200, 201)

    def prepare(self, world: World) -> None:
        world.prepare()
        self.ready(world)

    def ready(self, world: World) -> None:
        """What the request needs of a running session, also one that met a crash before."""

    def again(self, world: World) -> bool:
        """Make the session of an earlier crash ready for the next one; false where it is gone."""
        world.again()
        self.ready(world)
        return True

    def request(self, world: World) -> Answer | None:
        where = path(world.session, self.verb)
        return call(world.server, self.method, where, self.body, world.key)

    def repeat(self, world: World) -> Answer | None:
        return self.request(world)

    def rested(self, world: World) -> None:
        """Everything rests in a stable state, and no operation is under way."""
        for session in world.client.sessions.list():
            assert session.info.operation is None
            assert session.state in STABLE, session.info

    def goal(self, world: World, answer: Answer) -> None:
        raise NotImplementedError


class Once(Operation):
    """One that leaves no session it could be done with again."""

    def again(self, world: World) -> bool:
        return False


class Create(Once):
    def prepare(self, world: World) -> None:
        pass

    def request(self, world: World) -> Answer | None:
        return call(world.server, "POST", "/v1/sessions", {"name": world.key}, world.key)

    def goal(self, world: World, answer: Answer) -> None:
        found = world.client.sessions.list()
        assert [session.id for session in found] == [answer[1]["session"]]
        assert found[0].state == "running"
        world.session = found[0]
        assert found[0].exec("echo here").text == "here\n"


class Pause(Operation):
    verb = "pause"

    def goal(self, world: World, answer: Answer) -> None:
        assert world.session.refresh().state == "paused"
        world.check(world.session)


class Thaw(Operation):
    verb = "resume"

    def ready(self, world: World) -> None:
        world.session.pause()

    def goal(self, world: World, answer: Answer) -> None:
        assert world.session.refresh().state == "running"
        world.check(world.session)


class Restore(Thaw):
    def ready(self, world: World) -> None:
        world.session.suspend()


class Snapshot(Operation):
    verb = "snapshots"

    def request(self, world: World) -> Answer | None:
        where = path(world.session, self.verb)
        return call(world.server, "POST", where, {"label": world.key}, world.key)

    def goal(self, world: World, answer: Answer) -> None:
        world.check(world.session)
        kept = [item for item in world.session.history() if item.label == world.key]
        assert [item.id for item in kept] == [answer[1]["result"]["id"]]
        world.session.rollback(world.key)
        world.check(world.session)


class SnapshotPaused(Snapshot):
    def ready(self, world: World) -> None:
        world.session.pause()


class Suspend(Operation):
    verb = "suspend"
    body: ClassVar = {}

    def goal(self, world: World, answer: Answer) -> None:
        assert world.session.refresh().state == "suspended"
        assert eventually(lambda: world.machine.sandbox_of(world.session.id) is None)
        world.check(world.session)


class SuspendPaused(Suspend):
    def ready(self, world: World) -> None:
        world.session.pause()


class Rollback(Operation):
    verb = "rollback"

    def ready(self, world: World) -> None:
        world.mark()

    def request(self, world: World) -> Answer | None:
        body = {"snapshot": world.snapshot}
        return call(world.server, "POST", path(world.session, "rollback"), body, world.key)

    def goal(self, world: World, answer: Answer) -> None:
        assert world.session.refresh().state == "running"
        then = world.acked_then
        world.check(world.session, least=then, most=then)
        # What it left is in the tree: go forward again.
        tip = world.session.history()
        newest = [item for item in tip if item.kind == "auto" and item.memory]
        contents = set()
        for item in reversed(newest[-3:]):
            world.session.rollback(item.id)
            contents.add(len(world.session.files.read("/root/log").split()))
        assert world.acked in contents


class Promote(Operation):
    verb = "promote"

    def ready(self, world: World) -> None:
        [world.child] = world.session.fork()
        world.child.files.write("/root/who", world.key)

    def request(self, world: World) -> Answer | None:
        assert world.child is not None
        return call(world.server, "POST", path(world.child, "promote"), None, world.key)

    def goal(self, world: World, answer: Answer) -> None:
        assert answer[1]["session"] == world.session.id
        assert world.session.refresh().state == "running"
        world.check(world.session)
        assert world.session.files.read("/root/who") == world.key.encode()
        assert world.child is not None
        world.check(world.child)


class Fork(Operation):
    verb = "fork"
    body: ClassVar = {"n": 2}
    state = "running"

    def rested(self, world: World) -> None:
        super().rested(world)
        assert len(world.client.sessions.list()) in (1, 3)  # all of them or none

    def goal(self, world: World, answer: Answer) -> None:
        world.check(world.session)
        ids = {child["id"] for child in answer[1]["result"]}
        assert len(ids) == 2
        found = {session.id: session for session in world.client.sessions.list()}
        assert set(found) == ids | {world.session.id}
        for id in ids:
            assert found[id].state == self.state
            world.check(found[id])


class ForkShelved(Fork):
    body: ClassVar = {"n": 2, "start": False}
    state = "suspended"


class Delete(Once):
    method = "DELETE"
    answers = (204,)

    def request(self, world: World) -> Answer | None:
        where = f"/v1/sessions/{world.session.id}"
        return call(world.server, "DELETE", where, None, world.key)

    def goal(self, world: World, answer: Answer) -> None:
        assert world.client.sessions.list() == []


class DeletePaused(Delete):
    def ready(self, world: World) -> None:
        world.session.pause()


class Turn(Operation):
    """A command whose automatic snapshot meets the crash."""

    def request(self, world: World) -> Answer | None:
        world.sent += 1
        body = {"shell": APPEND}
        answer = call(world.server, "POST", path(world.session, "exec"), body, world.key)
        if answer is not None:
            assert answer[0] == 200, answer
            world.acked += 1
        return answer

    def goal(self, world: World, answer: Answer) -> None:
        world.check(world.session)
        world.session.suspend()
        world.check(world.session)


class Thin(Turn):
    def prepare(self, world: World) -> None:
        world.prepare(policy={"auto_memory_bytes": 0})

    def goal(self, world: World, answer: Answer) -> None:
        report = world.session.verify()
        assert report.ok, report.faults
        super().goal(world, answer)


class Lost(Once):
    """The sandbox dies, and the server while it deals with that."""

    verb = "resume"

    def prepare(self, world: World) -> None:
        world.prepare()
        world.session.history()  # waits for the last turn's snapshot, which can be relied on

    def request(self, world: World) -> Answer | None:
        sandbox = world.machine.sandbox_of(world.session.id)
        assert sandbox is not None
        assert world.machine.kill(sandbox) > 0
        return self.repeat(world)

    def repeat(self, world: World) -> Answer | None:
        return super().request(world)

    def goal(self, world: World, answer: Answer) -> None:
        assert world.session.refresh().state == "running"
        world.check(world.session)
        # What the dead sandbox had written beyond that is kept beside it, once.
        [salvaged] = [
            item for item in world.session.history() if (item.label or "").startswith("salvaged-")
        ]
        world.session.rollback(salvaged)
        lines = world.session.files.read("/root/log").decode().split()
        assert len(lines) == world.acked


class Import(Once):
    """A session that comes from an archive; the one it was made of is gone."""

    answers = (201,)
    archive = b""
    acked = 0

    def prepare(self, world: World) -> None:
        if not self.archive:
            world.prepare()
            archive = io.BytesIO()
            world.session.export(archive)
            self.archive, self.acked = archive.getvalue(), world.acked
            world.session.delete()
        world.acked = world.sent = self.acked

    def request(self, world: World) -> Answer | None:
        return call(world.server, "POST", "/v1/import", self.archive, world.key)

    def rested(self, world: World) -> None:
        super().rested(world)
        assert len(world.client.sessions.list()) <= 1  # one where only the answer was lost

    def goal(self, world: World, answer: Answer) -> None:
        found = world.client.sessions.list()
        assert answer[1]["id"] in {session.id for session in found}
        for session in found:
            world.check(session)


class Template(Operation):
    """A template of a session's present state: one version, however often it is asked for."""

    verb = "template"
    body: ClassVar = {"name": "crashed"}

    def goal(self, world: World, answer: Answer) -> None:
        world.check(world.session)
        assert world.client.templates.get("crashed").versions == [1]
        world.check(world.client.sessions.create(template="crashed"))
        world.client.templates.remove("crashed")


class BuildImage(Once):
    """A template of an image that is sent; a version that was made before the crash may be there
    twice, as only the answer was lost."""

    answers = (201,)

    def prepare(self, world: World) -> None:
        pass

    def request(self, world: World) -> Answer | None:
        image = MadeImage([layer([member("marker", b"here")])]).archive()
        return call(world.server, "POST", "/v1/templates/crashed", image, world.key)

    def goal(self, world: World, answer: Answer) -> None:
        found = world.client.templates.get("crashed")
        assert found.version == answer[1]["version"] == 1
        world.client.templates.remove("crashed")


OPERATIONS: dict[str, Operation] = {
    kind.__name__: kind()
    for kind in (
        *(Create, Pause, Thaw, Restore, Snapshot, SnapshotPaused, Suspend, SuspendPaused),
        *(Rollback, Promote, Fork, ForkShelved, Delete, DeletePaused, Turn, Thin, Lost, Import),
        *(Template, BuildImage),
    )
}

CASES: list[tuple[str, list[str]]] = [
    ("Create", ["create.begin", "create.place", "create.start", "create.end"]),
    ("Create", ["start.record", "start.mount", "start.launch"]),
    ("Pause", ["pause.begin", "pause.freeze", "pause.end"]),
    ("Thaw", ["resume.begin", "resume.thaw", "resume.end"]),
    ("Restore", ["resume.begin", "resume.place", "start.launch", "resume.start"]),
    ("Snapshot", ["snapshot.begin", "snapshot.capture", "snapshot.publish", "snapshot.end"]),
    ("Snapshot", ["capture.freeze", "capture.checkpoint", "capture.copy", "capture.thaw"]),
    ("SnapshotPaused", ["capture.copy", "snapshot.capture"]),
    ("Turn", ["capture.freeze", "capture.copy", "auto.capture", "capture.store"]),
    ("Turn", ["auto.publish", "auto.commit"]),
    ("Thin", ["thin.drop"]),
    ("Suspend", ["suspend.begin", "suspend.capture.before", "seal.freeze", "seal.checkpoint"]),
    ("Suspend", ["suspend.capture", "suspend.seal.before", "suspend.seal", "stop.kill"]),
    ("Suspend", ["suspend.kill", "suspend.take", "suspend.publish", "suspend.end"]),
    ("Suspend", ["end.unmount", "end.rename"]),
    ("SuspendPaused", ["seal.checkpoint", "suspend.seal"]),
    ("Rollback", ["rollback.begin", "rollback.kept.before", "rollback.kept", "rollback.place"]),
    ("Rollback", ["rollback.start", "rollback.commit", "end.kill", "rollback.end"]),
    ("Promote", ["promote.begin", "promote.point.before", "promote.point", "promote.kept"]),
    ("Promote", ["promote.start", "promote.commit", "promote.end"]),
    ("Fork", ["fork.begin", "fork.point.before", "fork.point", "fork.place", "fork.start"]),
    ("Fork", ["fork.start:2", "fork.child", "fork.child:2", "fork.children", "fork.end"]),
    ("ForkShelved", ["fork.shelved", "fork.shelved:2"]),
    ("Delete", ["delete.begin", "delete.abort", "delete.commit", "delete.destroy", "delete.end"]),
    ("Delete", ["end.kill", "end.rename", "collect.row", "collect.manifest"]),
    ("DeletePaused", ["delete.abort"]),
    ("Import", ["import.received", "import.take", "import.publish", "import.commit"]),
    ("Template", ["template.captured", "template.published", "template.commit"]),
    ("BuildImage", ["template.received", "template.unpacked"]),
    ("Lost", ["stop.kill", "salvage.take", "lost.salvage", "lost.commit"]),
]
POINTS = [(operation, point) for operation, points in CASES for point in points]


class Crashed:
    """One server for all points. A session is used for as many of them as it comes back whole from;
    one that a test failed with is not used again."""

    def __init__(self, directory: Path) -> None:
        self.server = ServerProcess(directory / "data")
        self._point = directory / "crash-at"
        self._kept: tuple[Operation, World] | None = None

    def start(self) -> None:
        self._point.unlink(missing_ok=True)
        self.server.start(SOJOURN_CRASH_AT=f"@{self._point}")

    def prepared(self, verb: Operation) -> World:
        """A world in which the verb can be asked for, and nothing else is under way."""
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] is verb and verb.again(kept[1]):
            world = kept[1]
        else:
            self.clear()
            world = World(self.server)
            verb.prepare(world)
        for session in world.client.sessions.list():
            session.history()  # waits for the last turn's snapshot
        self.settle(world)
        return world

    def clear(self) -> None:
        """Leave no session, and nothing of one."""
        if not self.server.running:
            self.start()
        client = self.server.client()
        for session in client.sessions.list():
            session.delete()
        Machine(self.server).check_empty()

    def settle(self, world: World) -> None:
        """Nothing is on the machine but what its sessions use."""
        found = [world.machine.sandbox_of(session.id) for session in world.client.sessions.list()]
        world.machine.check_empty(but=[sandbox for sandbox in found if sandbox is not None])

    def arm(self, point: str) -> None:
        """The server ends when it reaches the point."""
        written = self._point.with_suffix(".new")
        written.write_text(point)
        written.rename(self._point)

    def keep(self, verb: Operation, world: World) -> None:
        self._kept = verb, world


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashed]:
    crashed = Crashed(tmp_path_factory.mktemp("crash"))
    crashed.start()
    yield crashed
    crashed.clear()
    crashed.server.remove()


@pytest.mark.parametrize(("operation", "point"), POINTS, ids=[f"{o}-{p}" for o, p in POINTS])
def test_a_crash_converges(crashed: Crashed, operation: str, point: str) -> None:
    verb = OPERATIONS[operation]
    world = crashed.prepared(verb)
    crashed.arm(point)
    verb.request(world)
    assert crashed.server.wait(30) == -9, f"{point} was not reached"

    crashed.start()
    world.reconnect()
    await_true(lambda: verb.rested(world), REST_SECONDS)
    answer = verb.repeat(world)
    assert answer is not None
    assert answer[0] in verb.answers, answer
    verb.goal(world, answer)
    crashed.settle(world)
    crashed.keep(verb, world)


# -- no point is forgotten -------------------------------------------------------------------------


def named_points() -> set[str]:
    """Every point in the sources; a part that is known only at run time is `*`."""
    found: set[str] = set()
    for source in Path(sojourn.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, name = ast.unparse(node.func.value), node.func.attr
            if (owner, name) == ("faultpoints", "reach"):
                if source.name != "operations.py" or "{step}" not in ast.unparse(node.args[0]):
                    found.add(pattern(node.args[0]))
            elif (owner, name) == ("run", "step"):
                step = pattern(node.args[0])
                found |= {f"*.{step}", f"*.{step}.before"}
    return found


def pattern(name: ast.expr) -> str:
    if isinstance(name, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "*" for part in name.values]
        return "".join(parts)
    assert isinstance(name, ast.Constant), ast.unparse(name)
    return str(name.value)


def test_every_point_has_a_crash() -> None:
    tried = {point.partition(":")[0] for _, point in POINTS} | set(REPLICATION_POINTS)
    tried.update(*MIGRATION_POINTS)
    missing = {name for name in named_points() if not fnmatch.filter(tried, name)}
    assert not missing, f"add a case for {sorted(missing)}"
    verbs = {verb.value for verb in Verb if hasattr(Verbs, verb) or hasattr(Branches, verb)}
    assert len(verbs) == 9
    missing = {f"{verb}.{end}" for verb in verbs for end in ("begin", "end")} - tried
    assert not missing, f"add a case for {sorted(missing)}"
