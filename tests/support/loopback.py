"""Connections to anything but this machine, refused and told: what a test drives must not phone
home."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="module")
def only_loopback() -> Iterator[None]:
    """Holds in every module that imports it."""
    strangers: list[Any] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def connecting(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and not ipaddress.ip_address(address[0]).is_loopback:
            strangers.append(address)
            raise ConnectionRefusedError(f"{address} is outside")
        connect(self, address)

    def looking_up(host: Any, *rest: Any, **more: Any) -> Any:
        if host not in (None, "localhost", "127.0.0.1", "::1"):
            strangers.append(host)
            raise socket.gaierror(f"{host} is outside")
        return look_up(host, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connecting)
        patch.setattr(socket, "getaddrinfo", looking_up)
        yield
    assert not strangers, f"connections to {strangers}"
