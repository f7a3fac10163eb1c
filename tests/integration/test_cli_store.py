"""`sojourn store` and `sojourn recover`, on repositories in local directories."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sojourn.cli.main import run
from sojourn.database import open_database
from sojourn.errors import StoreUnreachable
from sojourn.model import Session, Snapshot, SnapshotKind, new_id
from sojourn.model.snapshots import LayerRef, SnapshotConfig
from sojourn.repository.copies import StoredCopies
from sojourn.repository.repository import Repository
from sojourn.repository.session_records import SessionRecord, SnapshotNote, TenantRecord
from sojourn.store.fingerprints import fingerprint
from sojourn.store.local import LocalStore
from support.databases import make_session

CONFIG = SnapshotConfig(template="base", env={}, user="root", cwd="/", hostname="box")
SECRET, OTHER = "the first secret of it all", "and another one after that"
TENANT = "ten_a"


class Node:
    """A data directory with a store, and the object store it sends to."""

    def __init__(self, directory: Path, secret: bytes | None = None) -> None:
        self.data = directory / "data"
        self.store = LocalStore(self.data / "store")
        self.place = directory / "objects"
        self.uppers = directory / "uppers"
        self.session = make_session(tenant=TENANT, name="kept")
        root = directory / "template"
        root.mkdir(parents=True)
        (root / "base").write_bytes(b"template")
        self.template = self.store.adopt_template(root, "base")
        self.repository = Repository.open(self.place.as_uri(), secret, create=True)
        self.repository.put_tenant(TenantRecord(TENANT, "acme", 1.0))

    def layer(self, content: bytes) -> LayerRef:
        upper = self.uppers / new_id("lay")
        upper.mkdir(parents=True)
        (upper / "file").write_bytes(content)
        return self.store.capture_layer(upper, since=None, suspects=set()).publish()

    def push(self, content: bytes) -> Snapshot:
        """A snapshot of the session with this file, sent."""
        layers = [self.template, self.layer(content)]
        snapshot = Snapshot(
            id=new_id("snp"),
            session=self.session.id,
            parent=None,
            kind=SnapshotKind.EXPLICIT,
            label=None,
            created_at=time.time(),
            layers=layers,
            memory=None,
            config=CONFIG,
            fingerprint=fingerprint(layers, None, CONFIG),
        )
        self.store.publish_snapshot(snapshot)
        self.repository.push(TENANT, snapshot, StoredCopies(self.store.root))
        return snapshot

    def record(self, *snapshots: Snapshot) -> Session:
        """Tell the store of the session, with the last of these as its head."""
        session = msgspec.structs.replace(self.session, head=snapshots[-1].id)
        notes = [SnapshotNote(snapshot.id) for snapshot in snapshots]
        self.repository.put_session(SessionRecord(session, notes, time.time(), "srv_1"))
        return session

    def packs(self, domain: str = TENANT) -> list[Path]:
        return sorted(path for path in (self.place / domain / "packs").rglob("*") if path.is_file())


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path)
    choose(monkeypatch, made)
    return made


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node whose object store is encrypted."""
    made = Node(tmp_path, SECRET.encode())
    choose(monkeypatch, made)
    return made


def choose(monkeypatch: pytest.MonkeyPatch, node: Node) -> None:
    """Let commands that are not told otherwise mean this node."""
    monkeypatch.setenv("SOJOURN_DATA", str(node.data))
    monkeypatch.setenv("SOJOURN_STORE", node.place.as_uri())
    monkeypatch.delenv("SOJOURN_STORE_KEY", raising=False)
    monkeypatch.delenv("SOJOURN_STORE_KEY_FILE", raising=False)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """One command in this process: exit code, output, error output."""
    capsys.readouterr()
    code = run(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """One command with --json, which says nothing on standard error: exit code, document."""
    code, out, err = said(capsys, *arguments, "--json")
    assert err == ""
    return code, json.loads(out)


def age(node: Node, seconds: float) -> None:
    """Let all objects have been put so much earlier."""
    for path in node.place.rglob("*"):
        if path.is_file():
            was = path.stat().st_mtime
            os.utime(path, (was - seconds, was - seconds))


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


# -- check --------------------------------------------------------------------------------------


def test_a_whole_store_is_found_whole(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.record(node.push(b"content"))
    for more in ((), ("--read-data",), ("--read-data-subset", "1/2")):
        code, found = told(capsys, "store", "check", *more)
        assert (code, found["damaged"], found["problems"]) == (0, False, [])
    code, out, _ = said(capsys, "store", "check", "--store", str(node.place))
    assert code == 0 and "no damage found" in out


def test_snapshots_whose_session_has_no_record_are_a_warning(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = node.push(b"content")
    node.record(taken)
    [record] = (node.place / TENANT / "sessions").rglob("ses_*")
    record.unlink()
    code, found = told(capsys, "store", "check")
    assert (code, found["damaged"]) == (0, False)
    [problem] = found["problems"]
    assert problem["severity"] == "warning" and "sojourn recover" in problem["cause"]
    assert (problem["sessions"], problem["snapshots"]) == ([node.session.id], [taken.id])
    code, out, _ = said(capsys, "store", "check")
    assert code == 0 and "no damage; 1 warning." in out and "no damage found" not in out


def test_a_missing_pack_is_found_with_what_it_takes_along(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = node.push(os.urandom(200_000))
    for pack in node.packs():
        pack.unlink()
    code, found = told(capsys, "store", "check")
    assert (code, found["damaged"]) == (112, True)
    affected = {id for problem in found["problems"] for id in problem["snapshots"]}
    assert affected == {snapshot.id}
    code, out, _ = said(capsys, "store", "check")
    assert code == 112
    assert snapshot.id in out and node.session.id in out and "sojourn store repair" in out


def test_a_flipped_bit_is_found_where_bytes_are_read(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.push(os.urandom(200_000))
    (pack,) = [path for path in node.packs() if path.stat().st_size > 200_000]
    flip(pack, 100_000)
    assert told(capsys, "store", "check")[0] == 0, "the structure is as it was"
    code, found = told(capsys, "store", "check", "--read-data")
    assert code == 112
    assert any(problem["object"].endswith(pack.name) for problem in found["problems"])
    codes = [told(capsys, "store", "check", "--read-data-subset", f"{n}/3")[0] for n in (1, 2, 3)]
    assert sorted(codes) == [0, 0, 112], "each pack is in one part"


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "--read-data", "--read-data-subset", "1/2"),
        ("check", "--read-data-subset", "0/2"),
        ("check", "--read-data-subset", "3/2"),
        ("check", "--read-data-subset", "half"),
        ("check", "--read-data-subset", "1/2/3"),
        ("gc", "--grace", "-1"),
        ("gc", "--grace", "soon"),
        ("check", "--store", "none"),
        ("check", "--store", "gopher://x/y"),
        ("check", "--key-file", "/nowhere/at/all"),
        ("key", "rotate"),
    ],
)
def test_what_makes_no_sense_is_refused(
    node: Node, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    code, out, err = said(capsys, "store", *arguments, "--json")
    assert (code, out) == (101, "")
    assert json.loads(err)["code"] == "invalid_request"


@pytest.mark.parametrize("command", ["check", "stats", "gc", "repair"])
def test_where_there_is_no_store_none_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    place = tmp_path / "nothing"
    code, out, err = said(capsys, "store", command, "--store", str(place))
    assert (code, out) == (118, "")
    assert "mounted" in err
    assert not place.exists()


# -- keys ---------------------------------------------------------------------------------------


def test_an_encrypted_store_is_opened_by_file_or_variable_alone(
    sealed: Node,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sealed.push(b"content")
    code, out, err = said(capsys, "store", "check")
    assert (code, out) == (120, "")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(SECRET + "\n")
    wrong.write_text(OTHER)
    code, out, err = said(capsys, "store", "check", "--key-file", str(wrong))
    assert (code, out) == (120, "")
    assert OTHER not in err
    assert told(capsys, "store", "check", "--key-file", str(right))[0] == 0
    monkeypatch.setenv("SOJOURN_STORE_KEY_FILE", str(right))
    assert told(capsys, "store", "check")[0] == 0
    monkeypatch.delenv("SOJOURN_STORE_KEY_FILE")
    monkeypatch.setenv("SOJOURN_STORE_KEY", SECRET)
    code, out, err = said(capsys, "store", "check", "--read-data")
    assert code == 0 and SECRET not in out + err


def test_after_a_rotation_only_the_new_secret_opens(
    sealed: Node,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sealed.push(b"content")
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text(SECRET)
    new.write_text(OTHER)
    monkeypatch.setenv("SOJOURN_STORE_KEY_FILE", str(old))
    code, out, err = said(capsys, "store", "key", "rotate", "--new-key-file", str(new))
    assert (code, err) == (0, "")
    assert SECRET not in out and OTHER not in out
    assert said(capsys, "store", "check")[0] == 120
    assert told(capsys, "store", "check", "--read-data", "--key-file", str(new))[0] == 0


def test_a_store_without_encryption_has_no_key_to_change(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    new.write_text(OTHER)
    code, _, err = said(capsys, "store", "key", "rotate", "--new-key-file", str(new))
    assert code == 120 and "not encrypted" in err
    assert told(capsys, "store", "check")[0] == 0


# -- gc and stats -------------------------------------------------------------------------------


def test_what_no_snapshot_needs_waits_for_its_grace_and_goes(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, gone = node.push(os.urandom(100_000)), node.push(os.urandom(200_000))
    node.repository.delete_snapshot(TENANT, gone.id)
    before = node.packs()
    code, found = told(capsys, "store", "gc")
    assert code == 0 and found["bytes"] == 0
    assert node.packs() == before
    assert found["waiting_bytes"] == 0 and found["young_bytes"] > 200_000
    code, out, _ = said(capsys, "store", "gc")
    assert "a gc in an hour or later" in out
    age(node, 2 * 3600.0)
    code, out, _ = said(capsys, "store", "gc")
    assert code == 0 and node.packs() == before
    [waits] = [line for line in out.splitlines() if line.startswith("waits for its grace")]
    assert "KiB in 2 packs (removed by a gc in an hour or later)" in waits
    code, found = told(capsys, "store", "gc", "--grace", "0")
    assert code == 0 and found["bytes"] > 200_000 and found["snapshots"] == 1
    assert sum(pack.stat().st_size for pack in node.packs()) < 150_000
    assert told(capsys, "store", "check", "--read-data")[0] == 0
    node.repository.fetch_layer(TENANT, kept.layers[1].id, node.data.parent / "restored")
    code, out, _ = said(capsys, "store", "gc", "--grace", "0")
    assert code == 0 and "freed" in out


def test_a_dry_run_changes_nothing(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.push(b"kept")
    gone = node.push(os.urandom(200_000))
    assert told(capsys, "store", "gc", "--dry-run")[1]["dead_bytes"] < 1000
    node.repository.delete_snapshot(TENANT, gone.id)
    before = {path: path.stat().st_mtime_ns for path in node.place.rglob("*") if path.is_file()}
    code, found = told(capsys, "store", "gc", "--dry-run", "--grace", "0")
    assert code == 0 and found["snapshots"] == 1 and found["dead_bytes"] > 200_000
    assert "not needed" in said(capsys, "store", "gc", "--dry-run")[1]
    after = {path: path.stat().st_mtime_ns for path in node.place.rglob("*") if path.is_file()}
    assert after == before


def test_what_snapshots_take_is_counted(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    content = os.urandom(300_000)
    one, same, other = node.push(content), node.push(content), node.push(b"x" * 1_000_000)
    code, found = told(capsys, "store", "stats")
    assert code == 0
    assert found["total"]["snapshots"] == 3
    takes = found["snapshots"]
    assert takes[one.id]["unique"] < 1000 and takes[one.id]["shared"] > 300_000
    assert takes[one.id] == takes[same.id]
    assert 0 < takes[other.id]["unique"] < 100_000 < takes[other.id]["logical"]
    assert found["sessions"][node.session.id]["unique"] > 300_000
    assert found["deduplication"] > 1.1 and found["compression"] > 1.5
    for by, id in (("tenant", TENANT), ("session", node.session.id), ("snapshot", one.id)):
        code, out, _ = said(capsys, "store", "stats", "--by", by)
        assert code == 0 and id in out and "ALONE" in out and "compression" in out


# -- repair -------------------------------------------------------------------------------------


def test_a_repair_takes_from_a_node_what_the_store_has_lost(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.push(os.urandom(200_000))
    for pack in node.packs():
        pack.unlink()
    assert told(capsys, "store", "check")[0] == 112
    code, found = told(capsys, "store", "repair")
    assert code == 0 and found["damaged"] == [] and found["layers"] > 0
    assert told(capsys, "store", "check", "--read-data")[0] == 0


def test_what_nobody_has_is_named_by_every_later_check(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, whole = node.push(os.urandom(200_000)), node.push(os.urandom(100_000))
    node.record(lost, whole)
    (pack,) = [path for path in node.packs() if path.stat().st_size > 200_000]
    pack.unlink()
    elsewhere = ("--data", str(tmp_path / "elsewhere"))
    code, found = told(capsys, "store", "repair", *elsewhere)
    assert code == 112
    assert [damage["snapshot"] for damage in found["damaged"]] == [lost.id]
    code, out, _ = said(capsys, "store", "check")
    assert code == 112 and lost.id in out and whole.id not in out
    code, out, _ = said(capsys, "store", "repair", *elsewhere)
    assert code == 112 and f"damaged: snapshot {lost.id} of session {node.session.id}" in out
    code, found = told(capsys, "store", "repair", *elsewhere, "--from", str(node.data))
    assert code == 0 and found["healed"] == [lost.id]
    assert told(capsys, "store", "check", "--read-data")[0] == 0


# -- recover ------------------------------------------------------------------------------------


async def _sessions(data: Path) -> list[Session]:
    database = await open_database(data / "sojourn.db")
    try:
        return (await database.list_sessions(None)).items
    finally:
        await database.close()


def test_a_lost_data_directory_is_made_anew_once(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import asyncio

    first, second = node.push(b"first"), node.push(b"second")
    session = node.record(first, second)
    data = tmp_path / "recovered"
    code, found = told(capsys, "recover", "--data", str(data))
    assert code == 0
    assert (found["tenants"], found["sessions"], found["snapshots"]) == (1, 1, 2)
    assert found["faults"] == []
    (back,) = asyncio.run(_sessions(data))
    assert (back.id, back.name, back.head) == (session.id, session.name, second.id)
    assert back.epoch > session.epoch
    code, _, err = said(capsys, "recover", "--data", str(data))
    assert code == 104 and "holds sessions already" in err


def test_what_cannot_be_read_is_named_and_the_rest_is_recovered(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = node.push(b"first"), node.push(b"second")
    node.record(first, second)
    flip(node.place / TENANT / "snapshots" / second.id, 60)
    code, out, err = said(capsys, "recover", "--data", str(tmp_path / "recovered"))
    assert code == 112
    assert "lost: " in err and second.id in err
    assert "sessions        1" in out and "snapshots       1" in out


def test_a_name_that_two_records_claim_goes_to_the_newer(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One was renamed, the other got its name, and the node was lost before the store knew both."""
    import asyncio

    renamed = node.record(node.push(b"first"))
    node.session = make_session(tenant=TENANT, name=renamed.name)
    named = node.record(node.push(b"second"))
    data = tmp_path / "recovered"
    code, found = told(capsys, "recover", "--data", str(data))
    assert (code, found["sessions"], found["faults"]) == (0, 2, [])
    back = {session.id: session.name for session in asyncio.run(_sessions(data))}
    assert back == {named.id: "kept", renamed.id: f"kept-{renamed.id}"}


def test_a_recovery_that_was_cut_off_is_repeated(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it had come to the last of several tenants."""
    import asyncio

    session = node.record(node.push(b"first"))
    other = msgspec.structs.replace(session, id=new_id("ses"), tenant="ten_z", head=None)
    node.repository.put_tenant(TenantRecord("ten_z", "last", 2.0))
    node.repository.put_session(SessionRecord(other, [], time.time(), "srv_1"))
    data = tmp_path / "recovered"
    whole = Repository.put_session

    def cut_off(self: Repository, record: SessionRecord, *, take_over: bool = False) -> None:
        if record.session.id == other.id:
            raise StoreUnreachable("the line is cut")
        whole(self, record, take_over=take_over)

    with monkeypatch.context() as patched:
        patched.setattr(Repository, "put_session", cut_off)
        code, _, err = said(capsys, "recover", "--data", str(data))
    assert code == 118 and "the line is cut" in err
    assert asyncio.run(_sessions(data)) == []
    code, found = told(capsys, "recover", "--data", str(data))
    assert (code, found["tenants"], found["sessions"]) == (112, 2, 2)  # one has no snapshot
    assert {one.id for one in asyncio.run(_sessions(data))} == {session.id, other.id}


def test_recovery_needs_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(
        capsys, "recover", "--store", str(tmp_path / "none-here"), "--data", str(tmp_path / "data")
    )
    assert code == 118 and "none-here" in err and "mounted" in err
    assert not (tmp_path / "none-here").exists()


@pytest.mark.parametrize("what", ["domain", "packs", "pack", "record"])
def test_every_command_gives_one_verdict_on_a_link_in_the_store(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """Also where it leads to what should be there."""
    node.record(node.push(b"content"))
    domain = node.place / TENANT
    place = {
        "domain": domain,
        "packs": domain / "packs",
        "pack": next(path for path in (domain / "packs").rglob("*") if path.is_file()),
        "record": next((domain / "sessions").rglob("ses_*")),
    }[what]
    place.rename(tmp_path / "away")
    place.symlink_to(tmp_path / "away")
    verdicts = {}
    for command in (
        ("store", "check"),
        ("store", "check", "--read-data"),
        ("store", "gc"),
        ("store", "stats"),
        ("store", "repair"),
        ("recover", "--data", str(tmp_path / "recovered")),
    ):
        code, out, err = said(capsys, *command)
        verdicts[command] = (code, place.relative_to(node.place).as_posix() in out + err)
    assert set(verdicts.values()) == {(112, True)}, verdicts
    assert place.is_symlink()
