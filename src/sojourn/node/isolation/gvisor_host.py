"""What a gVisor sandbox is given of the host besides its root tree.

Guarantee: processes inside see the memory they may use, not the host's; the program of the first
process is, at a restore, byte for byte the one of the checkpoint, because a checkpoint holds no
pages of a program that were only read, and the wrong bytes under a running process are its end.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from functools import lru_cache
from pathlib import Path

from sojourn.errors import ResumeFailed, StorageFull

OWN_NETWORK = "--own-network"
"""The option by which a supervisor is told that the network stack is the session's own."""

_NOTE = "supervisor"
_PROGRAM = "supervisor.bin"


def surroundings(
    helper: Path, supervisor: Path, control: Path, amount: int, files: Path
) -> list[str]:
    """A command prefix under which /proc/meminfo, from which runsc reads the total at start and
    restore, tells of `amount` bytes, and the network is a loopback that has every IPv4 address
    where `supervisor`, which is to run inside, keeps what is sent to them in hand.

    There the kernel lets nobody change `supervisor`, which all sandboxes share, and the directory
    `control`: that their mounts inside are read-only holds only until root inside mounts them
    anew, which gVisor lets it do in a user namespace.

    `helper` is a supervisor's program too, whose other part does it (supervisor/enter.c): a shell
    and the tools it calls would take three times as long.
    """
    mask = files / "meminfo"
    write_private(mask, f"MemTotal: {amount // 1024} kB\nMemFree: {amount // 1024} kB\n")
    how = "--enter" if _keeps_network(supervisor) else "--enter-plain"
    held = [word for path in (supervisor, control) for word in ("--read-only", os.fspath(path))]
    return [os.fspath(helper), how, os.fspath(mask), *held]


@lru_cache(maxsize=64)
def _keeps_network(supervisor: Path) -> bool:
    """Whether a kept copy, named by its content, is of a version that sets packet tables. It is
    asked without running it here: it came with an image, perhaps from elsewhere."""
    return OWN_NETWORK.encode() in supervisor.read_bytes()


def write_private(path: Path, text: str) -> None:
    """Write a file only the owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


class Supervisors:
    """Copies of every supervisor that images on this node were taken with, named by content."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._known: dict[tuple[str, int, int, int], Path] = {}

    def keep(self, program: Path) -> Path:
        """The copy of a program; made when it is new. Raises ResumeFailed, StorageFull."""
        try:
            return self._kept(program)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"no room for a copy of {program}: {error}") from error
            raise ResumeFailed(f"the supervisor cannot be used: {error}") from error

    def _kept(self, program: Path) -> Path:
        facts = program.stat()
        key = (os.fspath(program), facts.st_ino, facts.st_size, facts.st_mtime_ns)
        kept = self._known.get(key)
        if kept is not None and kept.exists():
            return kept
        digest = hashlib.sha256(program.read_bytes()).hexdigest()[:32]
        kept = self._directory / digest
        if not kept.exists():
            self._copy(program, kept)
        self._known[key] = kept
        return kept

    def _copy(self, program: Path, kept: Path) -> None:
        partial = self._directory / f".{kept.name}.{os.urandom(6).hex()}"
        try:
            shutil.copyfile(program, partial)
            partial.chmod(0o755)
            # The same everywhere, as all that the sandbox sees of the file has to be.
            os.utime(partial, (0, 0))
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.rename(kept)
        finally:
            partial.unlink(missing_ok=True)

    def attach(self, image: Path, name: str) -> None:
        """Put the supervisor that a memory image belongs to into it: a node that never ran this
        one can restore the image then. Shared by a link, so it takes no room here.
        Raises StorageFull."""
        program = self._directory / name
        try:
            write_private(image / _NOTE, name)
            (image / _PROGRAM).unlink(missing_ok=True)
            try:
                (image / _PROGRAM).hardlink_to(program)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EMLINK, errno.EPERM):
                    raise
                shutil.copyfile(program, image / _PROGRAM)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"no room for the supervisor of an image: {error}") from error
            raise

    def of_image(self, image: Path, offered: Path) -> Path:
        """The copy an image needs: kept here already, or the one the image carries.
        Raises ResumeFailed when there is neither, StorageFull."""
        current = self.keep(offered)
        try:
            name = (image / _NOTE).read_text()
        except FileNotFoundError:
            return current
        if name == current.name:
            return current
        wanted = self._directory / name
        if "/" not in name and wanted.is_file():
            return wanted
        carried = image / _PROGRAM
        if carried.is_file():
            kept = self.keep(carried)
            if kept.name == name:
                return kept
        raise ResumeFailed(
            f"the memory image was taken with the supervisor {name}, which is not on this node",
            next_step="Resume where it was taken, or resume its files only.",
        )
