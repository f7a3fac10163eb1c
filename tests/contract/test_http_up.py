"""The server as a process: one line on standard output, an address for clients, a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn import InvalidRequest, Sojourn
from sojourn.errors import HostUnfit
from sojourn.server.app import published_address
from sojourn.server.listening import listen

PROGRAM = """
import contextlib, sys
from pathlib import Path
from support.fake_service import FakeService
from sojourn.server.app import run

data = Path(sys.argv[1])

@contextlib.asynccontextmanager
async def open_service():
    (data / "sessions").mkdir(parents=True, exist_ok=True)
    service = FakeService(data / "sessions")
    try:
        yield service
    finally:
        await service.close()
        (data / "closed").touch()

run(open_service, data=data, address=sys.argv[2])
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_ready_served_stopped(
    tmp_path: Path,
    served: subprocess.Popen[str],
    sent: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert served.stdout is not None
    ready, url = served.stdout.readline().split()
    assert ready == "ready" and url.startswith("http://127.0.0.1:")
    told = json.loads((tmp_path / "server.json").read_text())
    assert told == {"url": url, "pid": served.pid}
    (tmp_path / "token").write_text("token-a\n")
    monkeypatch.setenv("SOJOURN_DATA", str(tmp_path))
    monkeypatch.delenv("SOJOURN_URL", raising=False)
    monkeypatch.delenv("SOJOURN_TOKEN", raising=False)
    with Sojourn() as client:
        assert client.url == url
        session = client.sessions.create()
        assert session.exec(["echo", "x"]).stdout == b"x\n"
        session.spawn(["sleep", "60"])
        served.send_signal(sent)
        rest, log = served.communicate(timeout=60)
    assert (served.returncode, rest) == (0, "") and "Traceback" not in log
    assert not (tmp_path / "server.json").exists()
    assert (tmp_path / "closed").exists()


def test_another_servers_address_is_left_alone(
    tmp_path: Path, served: subprocess.Popen[str]
) -> None:
    assert served.stdout is not None and served.stdout.readline()
    later = json.dumps({"url": "http://127.0.0.1:1", "pid": 1})
    (tmp_path / "server.json").write_text(later)
    served.terminate()
    served.communicate(timeout=60)
    assert (tmp_path / "server.json").read_text() == later


def test_a_second_server_does_not_tell_its_address_over_the_first_ones(
    tmp_path: Path, served: subprocess.Popen[str]
) -> None:
    assert served.stdout is not None and served.stdout.readline()
    told = (tmp_path / "server.json").read_text()
    with pytest.raises(HostUnfit, match="another server"):
        with published_address(tmp_path, "http://127.0.0.1:1") as publish:
            publish()
    assert (tmp_path / "server.json").read_text() == told
    served.terminate()
    served.communicate(timeout=60)
    with published_address(tmp_path, "http://127.0.0.1:1") as publish:
        assert not (tmp_path / "server.json").exists()
        publish()
        assert (tmp_path / "server.json").exists()
    assert not (tmp_path / "server.json").exists()


@pytest.mark.parametrize(
    "address", ["", "x", ":80", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:x"]
)
def test_impossible_addresses(address: str) -> None:
    with pytest.raises(InvalidRequest):
        listen(address)


def test_an_address_in_use() -> None:
    found, url = listen("127.0.0.1:0")
    with found:
        found.listen()
        with pytest.raises(InvalidRequest, match="cannot listen"):
            listen(url.removeprefix("http://"))
