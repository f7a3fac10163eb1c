"""The gateway process as the server keeps it: real processes, without sessions."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sojourn.errors import InvalidRequest, Unreachable
from sojourn.gateway.messages import Attach
from sojourn.model.network import NetworkMode, NetworkPolicy
from sojourn.server import gateways
from sojourn.server.gateways import EgressSettings, Gateway, egress_settings


class Rig:
    """A gateway and what it told."""

    def __init__(self, directory: Path, settings: EgressSettings | None = None) -> None:
        self.directory = directory
        self.lost = 0
        self.gateway = Gateway(
            settings or EgressSettings(), directory / "authority", self._handle, self._lost
        )

    async def _handle(self, message: object) -> None:
        raise AssertionError(f"nothing was to leave: {message}")

    async def _lost(self) -> None:
        self.lost += 1

    def socket(self, sandbox: str) -> Path:
        return self.directory / f"{sandbox}.sock"

    def wanted(self, sandbox: str) -> Callable[[], Awaitable[Attach]]:
        async def attach() -> Attach:
            policy = NetworkPolicy(NetworkMode.OPEN)
            return Attach(sandbox, "ses", "ten", 1, str(self.socket(sandbox)), policy)

        return attach

    async def serving(self, *, other_than: int | None = None) -> int:
        """The process that serves, once one does."""
        async with asyncio.timeout(30):
            while True:
                info = self.gateway.info()
                if info.running and info.pid is not None and info.pid != other_than:
                    return info.pid
                await asyncio.sleep(0.02)


def run(rig: Rig, scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await scenario(rig)
        finally:
            await rig.gateway.close()

    asyncio.run(whole())


def gone(pid: int) -> bool:
    return not Path("/proc", str(pid)).exists()


def test_it_is_started_when_it_is_needed_and_ends_with_its_server(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        assert not rig.gateway.info().running
        await rig.gateway.attach("one", rig.wanted("one"))
        info = rig.gateway.info()
        assert info.running and info.sandboxes == 1 and info.restarts == 0
        assert rig.socket("one").is_socket()
        assert (tmp_path / "authority" / "ca.pem").exists()
        await rig.gateway.detach("one")
        assert not rig.socket("one").exists()
        await rig.gateway.detach("one")
        assert info.pid is not None
        await rig.gateway.close()
        assert gone(info.pid)
        assert not rig.gateway.info().running
        with pytest.raises(Unreachable):
            await rig.gateway.need()

    run(Rig(tmp_path), scenario)


def test_one_that_dies_is_started_again_and_serves_all_again(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        for name in ("one", "two", "gone"):
            await rig.gateway.attach(name, rig.wanted(name))
        await rig.gateway.detach("gone")
        first = await rig.serving()
        for name in ("one", "two"):
            rig.socket(name).unlink()
        os.kill(first, signal.SIGKILL)
        await rig.serving(other_than=first)
        assert rig.socket("one").is_socket() and rig.socket("two").is_socket()
        assert not rig.socket("gone").exists()
        assert rig.lost == 1
        assert rig.gateway.info().restarts == 1

    run(Rig(tmp_path), scenario)


def test_one_that_does_not_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.gateway.attach("one", rig.wanted("one"))
        first = await rig.serving()
        monkeypatch.setattr(gateways, "_ANSWER_SECONDS", 0.3)
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(Unreachable):
            await rig.gateway.attach("one", rig.wanted("one"))
        monkeypatch.setattr(gateways, "_ANSWER_SECONDS", 5.0)
        await rig.serving(other_than=first)
        assert gone(first)
        await rig.gateway.attach("two", rig.wanted("two"))

    run(Rig(tmp_path), scenario)


def test_one_that_is_slow_to_load_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the start of a process takes longer than any answer may."""
    monkeypatch.setattr(gateways, "_ANSWER_SECONDS", 0.001)

    async def scenario(rig: Rig) -> None:
        await rig.gateway.need()
        info = rig.gateway.info()
        assert info.running and info.restarts == 0

    run(Rig(tmp_path), scenario)


def test_one_that_cannot_start_says_why_and_holds_up_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(gateways, "_START_SECONDS", 3600.0)  # its end is enough
    not_a_namespace = tmp_path / "file"
    not_a_namespace.write_text("")

    async def scenario(rig: Rig) -> None:
        async with asyncio.timeout(30):
            with pytest.raises(Unreachable) as refused:
                await rig.gateway.attach("one", rig.wanted("one"))
            assert refused.value.message.endswith(rig.gateway.info().error or "?")
            with pytest.raises(Unreachable):
                await rig.gateway.need()
        assert not rig.gateway.info().running

    run(Rig(tmp_path, EgressSettings(namespace=str(not_a_namespace))), scenario)


def test_settings_are_read_from_an_operators_words(tmp_path: Path) -> None:
    roots = tmp_path / "roots.pem"
    roots.write_text("")
    found = egress_settings("/proc/self/ns/net", "1.2.3.4, ::1", "10.0.0.0/8,fd00::/8", roots)
    assert found == EgressSettings(
        "/proc/self/ns/net", ["1.2.3.4", "::1"], ["10.0.0.0/8", "fd00::/8"], str(roots)
    )
    assert egress_settings(None, None, None, None) == EgressSettings()


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("namespace", ("/nowhere", None, None, None)),
        ("nameservers", (None, "dns.example.com", None, None)),
        ("private", (None, None, "10.0.0.1/8", None)),
        ("roots", (None, None, None, Path("/nowhere/roots.pem"))),
    ],
)
def test_settings_that_cannot_be_used_name_their_option(
    field: str, words: tuple[str | None, str | None, str | None, Path | None]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        egress_settings(*words)
    assert f"--egress-{field}" in refused.value.message
