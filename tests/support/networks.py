"""Networks of machines for tests: namespaces on bridges of a namespace in the middle.

    with Networks({"db": "10.81.1", "s3": "10.81.2"}) as networks:
        machine = networks.machine("n1", "db", "s3")
        subprocess.run([*machine.inside, "ip", "addr"])
        machine.cut("db")        # nothing passes between it and that network, and nobody is told
        machine.join("db")
        with networks.entered(): ...  # sockets this thread makes are in the middle

Nothing of it is reachable from the host's own network. A namespace lives as long as its holder, a
process that ends with the test's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping
from typing import Self

_CLONE_NEWNET = 0x40000000


class Namespace:
    """A network namespace, held by a process that does nothing else."""

    def __init__(self) -> None:
        hold = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c"]
        self._holder = subprocess.Popen(
            [*hold, "ip link set lo up && echo up && exec sleep infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"up\n":
            raise RuntimeError("there is no network namespace")

    @property
    def pid(self) -> int:
        """A process in it."""
        return self._holder.pid

    @property
    def inside(self) -> list[str]:
        """What to put before a command so that it runs in it."""
        return ["nsenter", "-t", str(self.pid), "--net", "--"]

    def ip(self, *lines: str) -> None:
        """Run lines of `ip` in it."""
        text = "\n".join(lines).encode()
        subprocess.run([*self.inside, "ip", "-batch", "-"], input=text, check=True)

    def close(self) -> None:
        """Let go of it."""
        self._holder.kill()
        self._holder.wait()
        if self._holder.stdout is not None:
            self._holder.stdout.close()


class Machine(Namespace):
    """A namespace with a place in some networks."""

    def __init__(self, middle: Namespace, number: int, networks: Mapping[str, str]) -> None:
        super().__init__()
        self._middle = middle
        self._number = number
        self.addresses = {name: f"{prefix}.{number}" for name, prefix in networks.items()}
        for name, address in self.addresses.items():
            port = self._port(name)
            middle.ip(
                f"link add {port} type veth peer name {name} netns {self.pid}",
                f"link set {port} master {name} up",
            )
            self.ip(f"addr add {address}/24 dev {name}", f"link set {name} up")

    def _port(self, network: str) -> str:
        return f"{network}{self._number}"

    def cut(self, network: str) -> None:
        """Let nothing pass between it and a network. The link stays up: it sees only silence."""
        self._middle.ip(f"link set {self._port(network)} nomaster")

    def join(self, network: str) -> None:
        """Let everything pass again."""
        self._middle.ip(f"link set {self._port(network)} master {network}")


class Networks:
    """Networks by name, each with its prefix of 24 bits and the middle at its address 1."""

    def __init__(self, prefixes: Mapping[str, str]) -> None:
        self._prefixes = dict(prefixes)
        self.middle = Namespace()
        self._machines: list[Machine] = []
        self._descriptor = os.open(f"/proc/{self.middle.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        for name, prefix in self._prefixes.items():
            self.middle.ip(
                f"link add {name} type bridge forward_delay 0 stp_state 0",
                f"addr add {prefix}.1/24 dev {name}",
                f"link set {name} up",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self._machines:
            machine.close()
        os.close(self._descriptor)
        self.middle.close()

    def machine(self, *networks: str) -> Machine:
        """A new machine in these networks."""
        number = 11 + len(self._machines)
        made = Machine(self.middle, number, {name: self._prefixes[name] for name in networks})
        self._machines.append(made)
        return made

    def middle_address(self, network: str) -> str:
        """The address of the middle in a network."""
        return f"{self._prefixes[network]}.1"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be in the middle with this thread."""
        libc = ctypes.CDLL(None, use_errno=True)
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(libc, self._descriptor)
            try:
                yield
            finally:
                _enter(libc, own)
        finally:
            os.close(own)


def _enter(libc: ctypes.CDLL, descriptor: int) -> None:
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
