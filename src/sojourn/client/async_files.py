"""AsyncFiles of a session, asynchronous.

Guarantee: contents are exact bytes and streamed where they are large; a file is replaced whole or
not at all. Paths are absolute inside the session; bytes are taken for names that are not UTF-8.
"""

from __future__ import annotations

import asyncio
import stat as modes
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sojourn.client import core_files
from sojourn.client.async_transport import AsyncTransport, content_of, in_thread
from sojourn.client.core_files import PathLike
from sojourn.errors import FileMissing
from sojourn.wire.api import FileChange, FileInfo, TreeInfo


class AsyncFiles:
    """The files of one session. Every call resumes a paused or suspended session first.

    All methods may raise PathInvalid, FileMissing, FileConflict, Forbidden and SessionNotFound.
    """

    def __init__(self, transport: AsyncTransport, session: str) -> None:
        self._transport = transport
        self._session = session

    async def read(self, path: PathLike, *, offset: int = 0, length: int | None = None) -> bytes:
        """A file's bytes, or `length` of them from `offset` on."""
        if length == 0:
            return b""
        request = core_files.read_request(self._session, path, offset, length)
        return b"".join([piece async for piece in self._transport.content(request)])

    async def read_text(self, path: PathLike) -> str:
        """A file's content as UTF-8 text. Raises UnicodeDecodeError."""
        return (await self.read(path)).decode()

    async def stream(
        self, path: PathLike, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """A file's bytes in pieces, for files of any size."""
        request = core_files.read_request(self._session, path, offset, length)
        async for piece in self._transport.content(request):
            yield piece

    async def write(
        self,
        path: PathLike,
        data: Any,
        *,
        mode: int | None = None,
        user: str | None = None,
        append: bool = False,
    ) -> FileInfo:
        """Write bytes, text, an open file or an iterable of bytes to a file; parents are made.

        `mode` and `user` default to those of a file that is replaced. Raises StorageFull,
        DiskQuotaExceeded."""
        content = content_of(data)
        return await self._transport.run(
            core_files.write(self._session, path, content, mode=mode, user=user, append=append)
        )

    async def stat(self, path: PathLike, *, follow: bool = True) -> FileInfo:
        """Facts of a file; without `follow` of a symbolic link itself."""
        return await self._transport.run(core_files.stat(self._session, path, follow=follow))

    async def exists(self, path: PathLike) -> bool:
        """Whether something stands at the path (a dangling link does)."""
        try:
            await self.stat(path, follow=False)
        except FileMissing:
            return False
        return True

    async def remove(self, path: PathLike, *, recursive: bool = False) -> None:
        """Remove a file, or with `recursive` a directory and all in it."""
        await self._transport.run(core_files.remove(self._session, path, recursive=recursive))

    async def move(self, path: PathLike, to: PathLike) -> None:
        """Move or rename a file or directory."""
        await self._transport.run(core_files.move(self._session, path, to))

    async def mkdir(self, path: PathLike, *, mode: int = 0o755, parents: bool = True) -> None:
        """Make a directory; with `parents` also those above, and one that exists is fine."""
        await self._transport.run(core_files.mkdir(self._session, path, mode=mode, parents=parents))

    async def chmod(self, path: PathLike, mode: int) -> None:
        """Change a file's mode."""
        await self._transport.run(core_files.chmod(self._session, path, mode))

    async def watch(self, path: PathLike, *, recursive: bool = False) -> AsyncIterator[FileChange]:
        """Changes under a directory as they happen; kind `overflow` says that some were missed."""
        source = core_files.watch_source(self._session, path, recursive=recursive)
        async for change in self._transport.stream(source):
            yield change

    async def upload(
        self, local: str | Path, remote: PathLike, *, owner: str | None = None
    ) -> TreeInfo:
        """Copy a local file to the path `remote`, or a local directory's content into the
        directory `remote`, with links, modes, owners and times. `owner` (UID:GID) overrides the
        local owners of a directory's content."""
        from sojourn.client import trees  # only where it is needed: tarfile takes time to load

        source = Path(local)
        if not await asyncio.to_thread(source.is_dir):
            mode = modes.S_IMODE((await asyncio.to_thread(source.stat)).st_mode)
            with await asyncio.to_thread(source.open, "rb") as file:
                info = await self.write(remote, file, mode=mode)
            return TreeInfo(1, info.size)
        content = in_thread(trees.pack(source))
        return await self._transport.run(
            core_files.upload(self._session, remote, content, owner=owner)
        )

    async def download(
        self, remote: PathLike, local: str | Path, *, owners: bool = False
    ) -> TreeInfo:
        """Copy a file to the path `local`, or a directory's content into the directory `local`.

        `owners` also takes over owners and set-user-id bits. Nothing is written outside `local`,
        whatever names and links the session holds; device nodes are left out (`skipped`)."""
        from sojourn.client import trees  # as above

        target = Path(local)
        info = await self.stat(remote)
        if info.type != "dir":
            pieces = self._transport.content(
                core_files.read_request(self._session, remote, 0, None)
            )
            with trees.Saving(target, info.mode) as saving:
                async for piece in pieces:
                    await asyncio.to_thread(saving.feed, piece)
                return saving.finish()
        request = core_files.download_request(self._session, remote)
        with await asyncio.to_thread(trees.Unpacker, target, owners=owners) as unpacker:
            async for piece in self._transport.content(request):
                await asyncio.to_thread(unpacker.feed, piece)
            return await asyncio.to_thread(unpacker.finish)

    async def list(self, path: PathLike) -> list[FileInfo]:
        """The entries of a directory, sorted by name."""
        return await self._transport.run(core_files.list_files(self._session, path))
