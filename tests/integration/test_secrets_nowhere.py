"""Secrets of tenants end to end: they reach their own domains, and lie nowhere else."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from sojourn import SecretNotFound, Session, Sojourn, allow
from sojourn.node.isolation import processes
from support.gateway_world import ALLOWED, NAMESERVER, OTHER, World
from support.servers import ServerProcess

pytestmark = pytest.mark.privileged

VALUE = "s3cr3t/+value?of&the=tenant~0123456789"
NEXT = "an0ther/+value?of&the=tenant~9876543210"
NAME = "API_TOKEN"
PLACEHOLDER = f"sojourn-secret-{NAME}"


def forms(value: str) -> set[bytes]:
    """How a value may be written, also in the middle of something encoded."""
    raw = value.encode()
    found = {raw, quote(value, safe="").encode(), quote(value).encode(), raw.hex().encode()}
    found.add(raw.hex().upper().encode())
    for shift in range(3):
        # Of the first and last characters some bits are those of the neighbours.
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            found.add(encode(b"\0" * shift + raw)[4:-4])
    found.add(json.dumps(value)[1:-1].encode())
    return found


def held(data: bytes, *values: str) -> list[bytes]:
    return [form for value in values for form in forms(value) if form in data]


class Setting:
    def __init__(self, directory: Path, world: World, objects: Path) -> None:
        self.world = world
        self.began = time.time() - 1.0
        self.server = ServerProcess(directory / "data", store=objects.as_uri())
        self.client = self.server.start(
            SOJOURN_EGRESS_NAMESPACE=world.namespace,
            SOJOURN_EGRESS_NAMESERVERS=NAMESERVER,
            SOJOURN_EGRESS_ROOTS=str(world.roots),
        )

    def set(self, value: str, *options: str) -> subprocess.CompletedProcess[bytes]:
        """By the command line."""
        return subprocess.run(
            [sys.executable, "-m", "sojourn.cli.main", "secret", "set", NAME, *options],
            input=value.encode() + b"\n",
            capture_output=True,
            timeout=60,
            env=os.environ | {"SOJOURN_URL": self.server.url, "SOJOURN_TOKEN": self.server.token},
            check=True,
        )


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, stocked: Path) -> Iterator[Setting]:
    directory = tmp_path_factory.mktemp("secrets")
    objects = Path(shutil.copytree(stocked, directory / "objects"))
    with World(directory) as world:
        world.zone.update({"api.example.com": [ALLOWED], "other.example.org": [OTHER]})
        world.serve(ALLOWED, 443, world.http, tls="api.example.com")
        world.serve(OTHER, 443, world.http, tls="other.example.org")
        made = Setting(directory, world, objects)
        try:
            yield made
        finally:
            made.server.remove()


def policy(**fields: object) -> object:
    return allow("api.example.com", "other.example.org", secrets=[NAME], **fields)


def echoed(session: Session, host: str, *more: str) -> str:
    """The head of a request as the program inside sees it echoed."""
    result = session.exec(["curl", "-sS", "-m", "20", *more, f"https://{host}/echo-head"])
    assert result.ok, result
    return result.text


def test_a_secret_reaches_its_domains_and_lies_nowhere_else(
    setting: Setting, tmp_path: Path
) -> None:
    client, world = setting.client, setting.world
    told = [setting.set(VALUE, "--domain", "api.example.com")]
    session = client.sessions.create(network=policy())  # type: ignore[arg-type]
    assert session.exec(f"echo ${NAME}").text.strip() == PLACEHOLDER

    # It is put in outside, and taken out of what comes back.
    assert f"Authorization: Bearer {PLACEHOLDER}" in echoed(session, "api.example.com").replace(
        "authorization:", "Authorization:"
    )
    assert f"Bearer {VALUE}".encode() in world.requests[-1]
    used = ["-H", f"Authorization: Bearer {PLACEHOLDER}"]
    assert PLACEHOLDER in echoed(session, "api.example.com", *used)
    assert f"Bearer {VALUE}".encode() in world.requests[-1]
    echoed(session, "other.example.org", *used)
    assert not held(world.requests[-1], VALUE)

    # A change and a removal hold at once, in the session that runs.
    told.append(setting.set(NEXT, "--domain", "api.example.com", "--header", "X-Key"))
    echoed(session, "api.example.com")
    head = world.requests[-1].lower()
    assert f"x-key: {NEXT}".encode() in head.replace(NEXT.lower().encode(), NEXT.encode())
    assert not held(world.requests[-1], VALUE)

    # A fork has it only where that was said.
    (fork,) = session.fork()
    assert fork.info.network.secrets == []
    echoed(fork, "api.example.com")
    assert not held(world.requests[-1], VALUE, NEXT)

    # Everything that is kept, answered or shown.
    session.run_code("import os; environment = dict(os.environ)")
    session.suspend(wait="durable")
    fork.snapshot()
    session.export(tmp_path / "archive")
    answers = _answers(client, session)
    fork.delete()
    assert not held(answers, VALUE, NEXT)
    for one in told:
        assert not held(one.stdout + one.stderr, VALUE, NEXT)
    assert not held((tmp_path / "archive").read_bytes(), VALUE, NEXT)
    assert not held(setting.server.log(1 << 30).encode(), VALUE, NEXT)
    objects = Path(setting.server.store[len("file://") :])
    files = _files(setting.server.data) + _files(objects, since=setting.began)
    assert any(objects in path.parents for path in files)
    assert any(path.name == "sojourn.db-wal" for path in files)
    seen = False
    for path in files:
        content = path.read_bytes()
        assert not held(content, VALUE, NEXT), path
        seen = seen or ("images" in path.parts and PLACEHOLDER.encode() in content)
    assert seen, "memory, which has what stands for the secret, was not looked at"
    assert not _shown_by_processes()

    client.secrets.delete(NAME)
    session.resume()
    echoed(session, "api.example.com")
    assert not held(world.requests[-1], VALUE, NEXT)
    with pytest.raises(SecretNotFound):
        client.secrets.delete(NAME)
    session.delete()


def _answers(client: Sojourn, session: Session) -> bytes:
    """What the API says of everything."""
    transport = client._transport
    from sojourn.client import core

    found = b""
    for where in (
        "/v1/secrets",
        "/v1/status",
        "/v1/sessions",
        f"/v1/sessions/{session.id}",
        f"/v1/sessions/{session.id}/events",
        f"/v1/sessions/{session.id}/effects?all=true",
        f"/v1/sessions/{session.id}/snapshots",
        "/v1/openapi.json",
    ):
        response = transport.send(core.Request(b"GET", where))
        assert response.status == 200, (where, response.body)
        found += response.body
    assert NAME.encode() in found
    return found


def _files(place: Path, since: float = 0.0) -> list[Path]:
    """The files below a directory; those that were there before are the template's."""
    found = [path for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in found if path.stat().st_mtime >= since]


def _shown_by_processes() -> list[int]:
    """Processes whose arguments or environment show a value."""
    found = []
    for pid in processes.all_pids():
        for name in ("cmdline", "environ"):
            try:
                content = Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue  # it has ended
            if held(content, VALUE, NEXT):
                found.append(pid)
    return found


def test_the_scan_finds_what_is_there(tmp_path: Path) -> None:
    """The forms that are looked for are found in what has them."""
    for form in (
        f"x{VALUE}y".encode(),
        base64.b64encode(f"a:{VALUE}".encode()),
        base64.b64encode(f"ab:{VALUE} and more".encode()),
        base64.urlsafe_b64encode(f"abc:{VALUE}z".encode()),
        quote(f"x {VALUE} y", safe="").encode(),
        f"zz{VALUE}".encode().hex().encode(),
    ):
        assert held(form, VALUE), form
    assert not held(b"something else", VALUE)
