"""Secrets at rest: an encrypted object store shows nothing of what is in it, and its key is nowhere
but where the operator put it."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.client import Sojourn
from sojourn.node.isolation import processes
from sojourn.repository.repository import Repository
from support.durable import environment, objects, recovered, settled, sojourn, stock, workers
from support.servers import ServerProcess, eventually

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("small_template"),
]

KEY = "the-operators-key-" + secrets.token_hex(8)
NEW_KEY = "the-operators-new-key-" + secrets.token_hex(8)
WRONG_KEY = "not-the-key-of-this-store"
FILE = "SOJOURN_STORE_KEY_FILE"
KEY_INVALID = 120


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with an encrypted object store; its key is given in the environment."""
    root = tmp_path_factory.mktemp("encrypted")
    place = stock(root, SOJOURN_STORE_KEY=KEY)
    server = ServerProcess(root / "node", store=place.as_uri())
    server.start(SOJOURN_STORE_KEY=KEY)
    yield server
    server.remove(SOJOURN_STORE_KEY=KEY)


def running(server: ServerProcess, key: str = KEY) -> Sojourn:
    return server.client() if server.running else server.start(SOJOURN_STORE_KEY=key)


def place_of(server: ServerProcess) -> Path:
    return Path(server.store.removeprefix("file://"))


def holding(place: Path, *needles: bytes) -> list[Path]:
    """The files of a store whose name or content has any of these."""
    return [
        path
        for path in place.rglob("*")
        if any(needle in os.fsencode(path.name) for needle in needles)
        or (path.is_file() and any(needle in path.read_bytes() for needle in needles))
    ]


def listing(place: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in place.rglob("*"):
        facts = path.stat()
        if path.is_file():
            found[str(path)] = (facts.st_size, facts.st_mtime_ns)
    return found


def test_nothing_of_a_session_shows_in_the_stored_bytes(
    encrypted: ServerProcess, tmp_path: Path
) -> None:
    client = running(encrypted)
    mark = {kind: f"{kind}-{secrets.token_hex(12)}" for kind in ("env", "file", "mem", "name")}
    session = client.sessions.create(
        name=mark["name"], env={"TOKEN": mark["env"]}, labels={"about": mark["name"]}
    )
    session.files.write("/srv/" + mark["name"], mark["file"].encode() * 3)
    session.exec(f"echo {mark['mem']} > /tmp/only-in-memory")
    session.run_code(f"held = {mark['mem']!r} * 2")
    session.spawn(["sleep", "1000"], env={"OWN": mark["mem"]})
    session.snapshot(mark["name"], wait="durable")
    session.suspend(wait="durable")
    eventually(lambda: settled(client))
    place = place_of(encrypted)
    needles = [text.encode() for text in mark.values()]
    assert holding(place, *needles, KEY.encode(), b"python3", b"/usr/bin") == []
    # All of it is there, for who has the key.
    repository = Repository.open(str(place), KEY.encode())
    [tenant] = repository.tenants()
    record = repository.read_session(tenant.id, session.id).session
    assert record.env == {"TOKEN": mark["env"]} and record.name == mark["name"]
    snapshot = repository.read_snapshot(tenant.id, record.head or "")
    tree, image = tmp_path / "tree", tmp_path / "image"
    tree.mkdir()
    for layer in snapshot.layers[1:]:
        repository.fetch_layer(tenant.id, layer.id, tree / layer.id)
    assert snapshot.memory is not None
    image.mkdir()
    repository.fetch_image(tenant.id, snapshot.memory.id, image)
    repository.close()
    assert holding(tree, mark["file"].encode()) and holding(tree, mark["name"].encode())
    assert holding(image, mark["mem"].encode())
    session.delete()


def test_the_key_is_in_no_process_list_log_or_answer_and_in_no_sandbox(
    encrypted: ServerProcess,
) -> None:
    client = running(encrypted)
    session = client.sessions.create()
    session.snapshot(wait="durable")
    [worker] = workers(encrypted.store)
    for pid in processes.all_pids():
        assert KEY not in " ".join(processes.command_line(pid)), processes.command_line(pid)
    # Nothing that belongs to a sandbox was started with it.
    inside = [pid for pid in encrypted.left() if pid not in (encrypted.pid, worker)]
    assert inside
    for pid in inside:
        assert KEY not in "\n".join(environment(pid)), processes.command_line(pid)
    assert KEY not in session.exec("env; cat /proc/*/environ; cat /proc/*/cmdline").text
    assert KEY not in encrypted.log(1 << 24)
    assert KEY not in str(client.status())
    session.delete()


@pytest.mark.parametrize("key", [WRONG_KEY, "short", None], ids=["wrong", "short", "none"])
def test_without_the_right_key_nothing_starts_and_nothing_is_touched(
    encrypted: ServerProcess, tmp_path: Path, key: str | None
) -> None:
    running(encrypted)
    encrypted.stop()
    place = place_of(encrypted)
    before = listing(place)
    given = {"SOJOURN_STORE_KEY": key} if key else {}
    with pytest.raises(RuntimeError) as raised:
        encrypted.start(**given)
    said = str(raised.value)
    assert f"exit {101 if key == 'short' else KEY_INVALID}" in said, said
    assert "key" in said.lower() and "Traceback" not in said.rpartition("no ready line")[2]
    commands = [
        ("store", "check", "--store", encrypted.store),
        ("store", "gc", "--grace", "0", "--store", encrypted.store),
        ("recover", "--store", encrypted.store, "--data", str(tmp_path / "new")),
    ]
    for words in commands:
        done = sojourn(*words, **given)
        assert done.returncode in ((101,) if key == "short" else (KEY_INVALID,)), done.stderr
        assert key is None or key not in done.stderr + done.stdout
    assert key is None or key not in encrypted.log(1 << 24)
    assert listing(place) == before


def test_an_encrypted_store_is_not_replaced_by_an_open_one(
    encrypted: ServerProcess, tmp_path: Path
) -> None:
    """Who can write to the store cannot have a server send in clear."""
    open_place = tmp_path / "open"
    Repository.open(str(open_place), create=True).close()
    before = listing(open_place)
    server = ServerProcess(tmp_path / "data", store=open_place.as_uri())
    with pytest.raises(RuntimeError, match=f"exit {KEY_INVALID}"):
        server.start(SOJOURN_STORE_KEY=KEY)
    assert listing(open_place) == before


def test_tenants_share_no_name_of_a_chunk_or_object(encrypted: ServerProcess) -> None:
    client = running(encrypted)
    same = os.urandom(300_000) + b"the same for both" * 1000
    for name in ("one", "two"):
        own = encrypted.client(client.tokens.create(name).token)
        session = own.sessions.create()
        session.files.write("/srv/same", same)
        session.suspend(memory=False, wait="durable")
    eventually(lambda: settled(client))
    repository = Repository.open(encrypted.store, KEY.encode())
    tenants = [tenant.id for tenant in repository.tenants() if tenant.name in ("one", "two")]
    assert len(tenants) == 2
    chunks = [
        {chunk for pack in repository.domain(tenant).index.packs() for chunk in pack.names()}
        for tenant in tenants
    ]
    assert chunks[0] and chunks[1] and chunks[0].isdisjoint(chunks[1])
    for kind in ("packs", "layers", "images", "snapshots"):
        names = [
            {path.name for path in objects(place_of(encrypted), kind, tenant)} for tenant in tenants
        ]
        assert names[0].isdisjoint(names[1])
    # One's objects cannot be put in the other's place.
    one, two = (repository.domain(tenant) for tenant in tenants)
    assert one.keys.naming != two.keys.naming and one.keys.sealing != two.keys.sealing
    repository.close()


def test_a_changed_key_opens_everything_and_the_old_one_nothing(
    encrypted: ServerProcess, tmp_path: Path
) -> None:
    client = running(encrypted)
    session = client.sessions.create()
    session.run_code("x = 41")
    session.suspend(wait="durable")
    eventually(lambda: settled(client))
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text(KEY + "\n")
    new.write_text(NEW_KEY + "\n")
    packs = listing(place_of(encrypted))
    done = sojourn(
        "store", "key", "rotate", "--store", encrypted.store, "--key-file", str(old),
        "--new-key-file", str(new),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert KEY not in done.stdout + done.stderr and NEW_KEY not in done.stdout + done.stderr
    try:
        changed = {
            key for key, facts in listing(place_of(encrypted)).items() if packs.get(key) != facts
        }
        assert {Path(key).parent.name for key in changed} == {"keys"}
        # The server that runs goes on, also where it starts its sending process anew; the next one
        # needs the new key.
        for pid in workers(encrypted.store):
            os.kill(pid, signal.SIGKILL)
        session.resume().run_code("x += 1")
        session.suspend(wait="durable")
        encrypted.stop()
        with pytest.raises(RuntimeError, match=f"exit {KEY_INVALID}"):
            encrypted.start(SOJOURN_STORE_KEY=KEY)
        client = encrypted.start(**{FILE: str(new)})
        session = client.sessions.get(session.id)
        session.resume().run_code("x *= 10")
        session.suspend(wait="durable")
        eventually(lambda: settled(client))
        encrypted.stop()
        other = recovered(encrypted.store, tmp_path / "second", **{FILE: str(new)})
        try:
            assert other.client().sessions.get(session.id).run_code("x").text == "420"
        finally:
            other.remove()
    finally:
        back = sojourn(
            "store", "key", "rotate", "--store", encrypted.store, "--key-file", str(new),
            "--new-key-file", str(old),
        )  # fmt: skip
        assert back.returncode == 0, back.stderr
    for text in (KEY, NEW_KEY):
        assert text not in encrypted.log(1 << 24)
