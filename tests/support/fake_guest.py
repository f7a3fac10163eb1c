"""A guest without a sandbox: a host directory for its files, host processes for its commands.

For tests of the HTTP layer alone; it promises what `sojourn.node.guest.Guest` promises of files and
processes, and nothing of freezing.
"""

# Paths are bytes here, which pathlib does not take.
# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH105, PTH106, PTH108, PTH110, PTH112, PTH115
# ruff: noqa: PTH116, PTH120, PTH123, PTH208, PTH211
from __future__ import annotations

import asyncio
import os
import signal as signals
import stat as modes
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from sojourn.errors import CommandNotStarted, FileConflict, FileMissing, ProcessNotFound
from sojourn.wire.guest import Output, ProcessSpec, ProcessState, Stat, WatchEvent

TYPES = {
    modes.S_IFREG: "file",
    modes.S_IFDIR: "dir",
    modes.S_IFLNK: "symlink",
    modes.S_IFIFO: "fifo",
    modes.S_IFSOCK: "socket",
    modes.S_IFCHR: "char",
    modes.S_IFBLK: "block",
}


class FakeProcess:
    """A host process whose output is kept whole."""

    def __init__(self, number: int, spec: ProcessSpec, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.out = (bytearray(), bytearray())
        self.changed = asyncio.Condition()
        self.state = ProcessState(
            number,
            process.pid,
            spec.argv,
            spec.tag,
            spec.pty is not None,
            time.time_ns(),
            None,
            None,
            None,
            False,
            None,
            (0, 0),
            (0, 0),
        )
        self.timed_out = False
        self.tasks = [asyncio.create_task(self._follow(spec))]

    async def _follow(self, spec: ProcessSpec) -> None:
        pumps = [
            asyncio.create_task(self._pump(self.process.stdout, 0)),
            asyncio.create_task(self._pump(self.process.stderr, 1)),
        ]
        try:
            async with asyncio.timeout(spec.timeout):
                code = await self.process.wait()
        except TimeoutError:
            self.timed_out = True
            os.killpg(self.process.pid, signals.SIGKILL)
            code = await self.process.wait()
        await asyncio.gather(*pumps)
        async with self.changed:
            self.state = msgspec.structs.replace(
                self.state,
                ended_ns=time.time_ns(),
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                timed_out=self.timed_out,
            )
            self.changed.notify_all()

    async def _pump(self, reader: asyncio.StreamReader | None, index: int) -> None:
        assert reader is not None
        while data := await reader.read(65536):
            async with self.changed:
                self.out[index].extend(data)
                self.changed.notify_all()

    def now(self) -> ProcessState:
        return msgspec.structs.replace(
            self.state, out=(0, len(self.out[0])), err=(0, len(self.out[1]))
        )


class FakeGuest:
    """Files under `root`, processes of this host."""

    def __init__(self, root: Path) -> None:
        self.root = os.fsencode(root)
        self._processes: dict[int, FakeProcess] = {}

    # -- files

    def _at(self, path: bytes) -> bytes:
        return self.root + path

    def _stat(self, path: bytes, follow: bool) -> Stat:
        at = self._at(path)
        try:
            found = os.stat(at) if follow else os.lstat(at)
        except FileNotFoundError as error:
            raise FileMissing(f"{path!r} is not there") from error
        except NotADirectoryError as error:
            raise FileConflict(f"{path!r} passes through a file") from error
        kind = TYPES[modes.S_IFMT(found.st_mode)]
        return Stat(
            path,
            kind,
            modes.S_IMODE(found.st_mode),
            found.st_uid,
            found.st_gid,
            found.st_size,
            found.st_mtime_ns,
            found.st_ino,
            found.st_nlink,
            found.st_rdev,
            os.readlink(at) if kind == "symlink" else None,
        )

    async def stat(self, path: bytes, *, follow: bool = True) -> Stat:
        return self._stat(path, follow)

    async def list(self, path: bytes) -> list[Stat]:
        if self._stat(path, True).type != "dir":
            raise FileConflict(f"{path!r} is not a directory")
        base = path.rstrip(b"/")
        return [
            self._stat(base + b"/" + name, False) for name in sorted(os.listdir(self._at(path)))
        ]

    async def walk(self, path: bytes) -> AsyncIterator[Stat]:
        for stat in await self.list(path):
            yield stat
            if stat.type == "dir":
                async for below in self.walk(stat.path):
                    yield below

    async def read(
        self, path: bytes, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        with open(self._at(path), "rb") as file:
            file.seek(offset)
            left = length
            while left is None or left > 0:
                chunk = file.read(65536 if left is None else min(left, 65536))
                if not chunk:
                    return
                if left is not None:
                    left -= len(chunk)
                yield chunk
                await asyncio.sleep(0)

    async def write_file(
        self,
        path: bytes,
        data: AsyncIterator[bytes] | bytes,
        *,
        mode: int | None = None,
        user: str | None = None,
        append: bool = False,
        parents: bool = True,
    ) -> Stat:
        at = self._at(path)
        if os.path.isdir(at):
            raise FileConflict(f"{path!r} is a directory")
        os.makedirs(os.path.dirname(at), exist_ok=True)
        fresh = at + b".part"
        try:
            with open(fresh, "wb") as file:
                if append and os.path.exists(at):
                    file.write(Path(os.fsdecode(at)).read_bytes())
                if isinstance(data, bytes):
                    file.write(data)
                else:
                    async for chunk in data:
                        file.write(chunk)
            os.chmod(fresh, 0o644 if mode is None else mode)
            os.replace(fresh, at)
        except BaseException:
            os.unlink(fresh)
            raise
        return self._stat(path, True)

    async def mkdir(self, path: bytes, *, mode: int = 0o755, parents: bool = True) -> None:
        at = self._at(path)
        try:
            if parents:
                os.makedirs(at, mode, exist_ok=True)
            else:
                os.mkdir(at, mode)
        except FileExistsError as error:
            raise FileConflict(f"{path!r} exists") from error
        except FileNotFoundError as error:
            raise FileMissing(f"{path!r} has no parent") from error

    async def remove(self, path: bytes, *, recursive: bool = False) -> None:
        stat = self._stat(path, False)
        if stat.type != "dir":
            os.unlink(self._at(path))
            return
        below = await self.list(path)
        if below and not recursive:
            raise FileConflict(f"{path!r} is not empty")
        for one in below:
            await self.remove(one.path, recursive=True)
        os.rmdir(self._at(path))

    async def move(self, source: bytes, target: bytes) -> None:
        self._stat(source, False)
        os.rename(self._at(source), self._at(target))

    async def chmod(self, path: bytes, mode: int) -> None:
        self._stat(path, True)
        os.chmod(self._at(path), mode)

    async def chown(self, path: bytes, uid: int, gid: int, *, follow: bool = False) -> None:
        if os.geteuid() == 0:
            os.chown(self._at(path), uid, gid, follow_symlinks=follow)

    async def utime(self, path: bytes, mtime_ns: int) -> None:
        os.utime(self._at(path), ns=(mtime_ns, mtime_ns), follow_symlinks=False)

    async def symlink(self, target: bytes, path: bytes) -> None:
        os.symlink(target, self._at(path))

    async def link(self, existing: bytes, path: bytes) -> None:
        os.link(self._at(existing), self._at(path), follow_symlinks=False)

    async def mknod(self, path: bytes, type: str, mode: int, rdev: int = 0) -> None:
        assert type == "fifo"
        os.mkfifo(self._at(path), mode)

    async def watch(self, path: bytes, *, recursive: bool = False) -> AsyncIterator[WatchEvent]:
        seen = {stat.path for stat in await self.list(path)}
        while True:
            now = {stat.path: stat for stat in await self.list(path)}
            for name in sorted(set(now) - seen):
                yield WatchEvent("created", name, now[name].type == "dir")
            seen = set(now)
            await asyncio.sleep(0.01)

    # -- processes

    async def start(self, spec: ProcessSpec) -> ProcessState:
        piped = asyncio.subprocess.PIPE
        stdin = piped if spec.stdin != "null" else asyncio.subprocess.DEVNULL
        env = os.environb | spec.env
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=stdin,
                stdout=piped,
                stderr=piped,
                env=env,
                cwd=self._at(spec.cwd or b"/"),
                start_new_session=True,
            )
        except OSError as error:
            raise CommandNotStarted(str(error.strerror), errno=error.errno) from error
        number = len(self._processes) + 1
        self._processes[number] = FakeProcess(number, spec, process)
        if spec.stdin == "inline":
            await self.write(number, spec.input)
            await self.close_stdin(number)
        return self._processes[number].now()

    def _get(self, process: int) -> FakeProcess:
        if process not in self._processes:
            raise ProcessNotFound(f"there is no process {process}")
        return self._processes[process]

    async def process(self, process: int) -> ProcessState:
        return self._get(process).now()

    async def processes(self) -> list[ProcessState]:
        return [one.now() for one in self._processes.values()]

    async def wait(self, process: int) -> ProcessState:
        found = self._get(process)
        async with found.changed:
            await found.changed.wait_for(lambda: not found.state.running)
        return found.now()

    async def output(
        self, process: int, offsets: tuple[int, int] = (0, 0)
    ) -> AsyncIterator[Output]:
        found = self._get(process)
        at = list(offsets)
        while True:
            async with found.changed:
                await found.changed.wait_for(
                    lambda: (
                        any(len(found.out[i]) > at[i] for i in (0, 1)) or not found.state.running
                    )
                )
                ended = not found.state.running
                pieces = [(i, bytes(found.out[i][at[i] :])) for i in (0, 1)]
            for index, data in pieces:
                if data:
                    yield Output(index + 1, at[index], data)
                    at[index] += len(data)
            if ended:
                return

    async def write(self, process: int, data: bytes) -> None:
        pipe = self._get(process).process.stdin
        assert pipe is not None
        if pipe.is_closing():
            return
        try:
            pipe.write(data)
            await pipe.drain()
        except (BrokenPipeError, ConnectionResetError):
            return  # as in a sandbox: taken and thrown away

    async def close_stdin(self, process: int) -> None:
        pipe = self._get(process).process.stdin
        assert pipe is not None
        pipe.close()

    async def signal(self, process: int, signal: int, *, group: bool = True) -> None:
        found = self._get(process)
        if found.state.running:
            os.killpg(found.process.pid, signal)

    async def resize(self, process: int, rows: int, columns: int) -> None:
        self._get(process)

    async def close(self) -> None:
        """End every process."""
        for found in self._processes.values():
            if found.state.running:
                os.killpg(found.process.pid, signals.SIGKILL)
        for found in self._processes.values():
            await asyncio.gather(*found.tasks)
