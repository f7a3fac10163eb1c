"""Memory images: the files a driver wrote of a frozen sandbox, kept under their content's address.

Guarantee: an image under `images/` is complete and synced and has its manifest beside it;
`verify` reads every byte and names the file that differs.

    images/<short>/manifest   names, sizes, hashes, driver, runtime, processor features
    images/<short>/files      the directory as the driver wrote it
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from sojourn.errors import CaptureFailed, IntegrityError
from sojourn.model.snapshots import MemoryRef
from sojourn.store.copying import disk_errors, sync_path
from sojourn.store.envelopes import read_checked, write_checked
from sojourn.store.fingerprints import hash_open_file, image_digest
from sojourn.store.layers import SHORT
from sojourn.store.staging import Pins, Staging
from sojourn.store.trees import SIZE, LocalScan, scan_tree

KIND = b"IMAG"
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def object_name(image: str) -> str:
    """How errors and faults name an image."""
    return f"memory {image}"


class Images:
    """The memory images of one store."""

    def __init__(self, root: Path, staging: Staging, pins: Pins) -> None:
        self.root = root
        self._staging = staging
        self._pins = pins
        # Set by the store's cache: brings an image that is not here, notes that one is used.
        self.bring: Callable[[str], None] | None = None
        self.note_use: Callable[[Path], None] | None = None

    def directory(self, image: str) -> Path:
        """Where an image lies or would lie."""
        if not re.fullmatch(r"[0-9a-f]{64}", image):
            raise IntegrityError(f"{image!r} is not an image id.", object=object_name(image))
        return self.root / image[:SHORT]

    def stage(self) -> Path:
        """A fresh directory for a driver to write into."""
        with disk_errors("making room for a memory image"):
            return self._staging.new()

    def discard(self, staged: Path) -> None:
        """Drop a staged image that is not to be published. Idempotent."""
        self._staging.drop(staged)

    def publish(self, staged: Path, driver: str, runtime: str, cpu: list[str]) -> MemoryRef:
        """Hash, sync and publish. On failure the staged image is dropped."""
        try:
            with disk_errors("storing a memory image"):
                return self._publish(staged, driver, runtime, cpu)
        finally:
            self._staging.drop(staged)

    def _publish(self, staged: Path, driver: str, runtime: str, cpu: list[str]) -> MemoryRef:
        scan = scan_tree(staged, 0)
        names = _files(scan)
        # Hashing and writing out use different resources, so they run side by side.
        with ThreadPoolExecutor(2) as pool:
            synced = pool.submit(_sync_all, staged, scan)
            digests = list(pool.map(lambda name: _hash(staged / name), names))
            synced.result()
        files = {
            name: (scan.entries[os.fsencode(name)][SIZE], digest.hex())
            for name, digest in zip(names, digests, strict=True)
        }
        ref = MemoryRef(
            id=image_digest(files),
            bytes=sum(size for size, _ in files.values()),
            files=files,
            driver=driver,
            runtime=runtime,
            cpu=cpu,
        )
        self._pins.fresh(ref.id)
        if self.present(ref.id):
            return self.read(ref.id)
        whole = self._staging.new()
        try:
            staged.rename(whole / "files")
            self._admit(whole, ref)
        finally:
            self._staging.drop(whole)
        return self.read(ref.id)

    def admit(self, staged: Path, ref: MemoryRef) -> None:
        """Sync what lies in `files` of a staging directory, and move it in place as the image."""
        _sync_all(staged / "files", scan_tree(staged / "files", 0))
        self._admit(staged, ref)

    def _admit(self, whole: Path, ref: MemoryRef) -> None:
        write_checked(KIND, whole / "manifest", msgspec.msgpack.encode(ref))
        sync_path(whole)
        try:
            whole.rename(self.directory(ref.id))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        sync_path(self.root)

    def present(self, image: str) -> bool:
        """Whether the image stands in the store."""
        return (self.directory(image) / "manifest").exists()

    def read(self, image: str, *, bring: bool = True) -> MemoryRef:
        """An image's checked manifest. Where the store has a source, an image that is not here is
        brought first, unless `bring` is false. Raises IntegrityError, or what the source raises."""
        if bring and self.bring is not None and not self.present(image):
            self.bring(image)
        directory = self.directory(image)
        ref = self._read(directory, image)
        if self.note_use is not None:
            self.note_use(directory)
        return ref

    def read_at(self, directory: Path) -> MemoryRef:
        """The checked manifest of whatever image lies in a directory. Raises IntegrityError."""
        return self._read(directory, None)

    @staticmethod
    def _read(directory: Path, image: str | None) -> MemoryRef:
        name = object_name(image or directory.name)
        try:
            payload = read_checked(KIND, directory / "manifest", name)
            ref = msgspec.msgpack.decode(payload, type=MemoryRef)
        except FileNotFoundError:
            raise IntegrityError(f"{name} is missing.", object=name) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise IntegrityError(
                f"The manifest of {name} is malformed: {error}", object=name
            ) from None
        right = ref.id == image if image is not None else ref.id.startswith(directory.name)
        if not right or image_digest(ref.files) != ref.id:
            raise IntegrityError(f"The manifest of {name} is not the one of its id.", object=name)
        return ref

    def path(self, image: str, *, bring: bool = True) -> Path:
        """Directory of a published image, all files there with their sizes."""
        ref = self.read(image, bring=bring)
        files = self.directory(image) / "files"
        name = object_name(image)
        for file, (size, _) in ref.files.items():
            try:
                found = (files / file).lstat()
            except OSError:
                raise IntegrityError(
                    f"{file} of {name} is missing.", object=name, path=file
                ) from None
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                raise IntegrityError(
                    f"{file} of {name} has {found.st_size} bytes where {size} were written.",
                    object=name,
                    path=file,
                )
        return files

    def verify(self, image: MemoryRef) -> None:
        """Read and compare every byte. Raises IntegrityError naming the file."""
        name = object_name(image.id)
        if image_digest(image.files) != image.id:
            raise IntegrityError(f"The reference to {name} is not the one of its id.", object=name)
        files = self.path(image.id)
        for file, (_, digest) in image.files.items():
            try:
                found = _hash(files / file).hex()
            except OSError as error:
                raise IntegrityError(
                    f"{file} of {name} cannot be read: {error.strerror}.", object=name, path=file
                ) from error
            if found != digest:
                raise IntegrityError(
                    f"{file} of {name} differs from what was written.", object=name, path=file
                )


def _files(scan: LocalScan) -> list[str]:
    names = []
    for path in sorted(scan.entries):
        mode = scan.entries[path][0]
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            raise CaptureFailed("A memory image holds something that is no file.", path=repr(path))
        try:
            names.append(path.decode())
        except UnicodeDecodeError:
            raise CaptureFailed(
                "A memory image's file has no text name.", path=repr(path)
            ) from None
    if not names:
        raise CaptureFailed("The memory image is empty.")
    return names


def _hash(path: Path) -> bytes:
    fd = os.open(path, _READ)
    try:
        return hash_open_file(fd)
    finally:
        os.close(fd)


def _sync_all(root: Path, scan: LocalScan) -> None:
    for path in sorted(scan.entries, reverse=True):
        sync_path(root / os.fsdecode(path))
