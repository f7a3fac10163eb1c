"""Numbers of the host's ports are not given again soon."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sojourn.server import host_ports
from sojourn.server.host_ports import HostPorts


def number(sock: socket.socket) -> int:
    with sock:
        return int(sock.getsockname()[1])


def sequence(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Have the kernel give these numbers, one after another."""
    given = iter(numbers)

    class Fixed(socket.socket):
        def getsockname(self) -> tuple[str, int]:
            return ("127.0.0.1", self.number)  # type: ignore[attr-defined]

    def listening(host: str, port: int) -> socket.socket:
        made = Fixed()
        made.number = next(given)  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr(host_ports, "listening", listening)


def test_a_used_number_is_passed_over_also_by_a_later_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence(monkeypatch, 5001, 5001, 5002, 5002, 5001, 5003)
    path = tmp_path / "numbers"
    first = HostPorts(path)
    assert [number(first.listen("127.0.0.1")) for _ in range(2)] == [5001, 5002]
    assert number(HostPorts(path).listen("127.0.0.1")) == 5003
    assert path.read_text().split() == ["5001", "5002", "5003"]


def test_the_oldest_are_forgotten_when_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_ports, "REMEMBERED", 4)
    sequence(monkeypatch, *range(5001, 5006), 5001)
    path = tmp_path / "numbers"
    found = HostPorts(path)
    for _ in range(5):
        found.listen("127.0.0.1").close()
    assert path.read_text().split() == ["5004", "5005"]
    assert number(found.listen("127.0.0.1")) == 5001


def test_real_sockets_listen(tmp_path: Path) -> None:
    with HostPorts(tmp_path / "numbers").listen("127.0.0.1") as made:
        socket.create_connection(made.getsockname()[:2], timeout=10).close()


def test_without_a_free_number_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence(monkeypatch, *[5001] * 500)
    found = HostPorts(tmp_path / "numbers")
    found.listen("127.0.0.1").close()
    with pytest.raises(OSError, match="not used lately"):
        found.listen("127.0.0.1")
