"""Archives: a session's snapshots as a repository in one file.

Guarantee: `write_archive` gives a file that holds everything the snapshots need, read from the
node's store and compared with what was sealed. `open_archive` gives one only after all of it was
looked at (see archive_checks.py): whatever is damaged, forged, cut off or asks for more than it may
is ArchiveInvalid, and nothing was written anywhere. What is then taken out is proven once more by
whoever takes it, as from any object store.

The snapshots and their layers lie in the domain `session`, the template's layer in `shared`. The
root key is made for the archive; with a secret all but the sizes of objects is hidden, and nobody
without it can make an archive that opens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from sojourn.errors import (
    ArchiveInvalid,
    Conflict,
    IntegrityError,
    InvalidRequest,
    NotFound,
    StoreKeyInvalid,
    Unsupported,
)
from sojourn.model import SessionState
from sojourn.model.snapshots import MemoryRef, Snapshot
from sojourn.repository import config
from sojourn.repository.archive_checks import DOMAIN, Contents, check_archive
from sojourn.repository.backends.archive_file import ArchiveReader, ArchiveWriter
from sojourn.repository.keys import clean_secret
from sojourn.repository.pushes import Copies
from sojourn.repository.repository import SHARED, Repository
from sojourn.repository.session_records import SessionRecord
from sojourn.store.manifests import Manifest


class Written(msgspec.Struct, frozen=True):
    """A finished archive: the digest at its end in hex, and its size."""

    digest: str
    bytes: int


def write_archive(
    descriptor: int,
    record: SessionRecord,
    snapshots: Sequence[Snapshot],
    copies: Copies,
    secret: bytes | None,
) -> Written:
    """Write the snapshots that `record` names, parents before children, to an empty file open for
    reading and writing. Raises IntegrityError, StorageFull, InvalidRequest (the secret)."""
    backend = ArchiveWriter(descriptor)
    repository = Repository(backend, *config.create(backend, secret))
    done: dict[str, Snapshot] = {}
    for snapshot in snapshots:
        repository.push(DOMAIN, snapshot, copies, done.get(snapshot.parent or ""))
        done[snapshot.id] = snapshot
    settled = msgspec.structs.replace(
        record.session,
        tenant=DOMAIN,
        state=SessionState.SUSPENDED,
        sandbox=None,
        node=None,
        idle_deadline=None,
        lifetime_deadline=None,
        cause=None,
    )
    repository.put_session(msgspec.structs.replace(record, session=settled, owner=""))
    return Written(*backend.finish())


class Archive:
    """An archive that was found good. Implements `sojourn.store.base.Source` for what is in it;
    what comes out otherwise than it was found is ArchiveInvalid."""

    def __init__(self, repository: Repository, reader: ArchiveReader, contents: Contents) -> None:
        self._repository = repository
        self.digest = reader.digest
        self.record = contents.record
        self.snapshots = contents.snapshots
        self.needed = contents.needed
        self._layers = contents.layers
        self._images = contents.images

    @property
    def objects(self) -> list[str]:
        """The ids of all layers and images."""
        return [*self._layers, *self._images]

    @property
    def layers(self) -> list[str]:
        """The ids of all layers."""
        return list(self._layers)

    @property
    def images(self) -> list[str]:
        """The ids of all memory images."""
        return sorted(self._images)

    def has_layer(self, id: str) -> bool:
        """Whether the archive holds the layer."""
        return id in self._layers

    def has_image(self, id: str) -> bool:
        """Whether the archive holds the memory image."""
        return id in self._images

    def fetch_layer(self, id: str, into: Path) -> Manifest:
        """Make the layer's tree at `into`. Raises ArchiveInvalid, StorageFull, HostUnfit."""
        domain = SHARED if SHARED in self._layers[id] else DOMAIN
        with refusing():
            return self._repository.fetch_layer(domain, id, into)

    def fetch_image(
        self, id: str, into: Path, cached: Sequence[tuple[MemoryRef, Path]]
    ) -> MemoryRef:
        """Write the image's files into `into`. Raises ArchiveInvalid, StorageFull."""
        with refusing():
            return self._repository.fetch_image(DOMAIN, id, into)


def open_archive(
    reader: ArchiveReader,
    secret: bytes | None,
    *,
    present: Callable[[str], bool] = lambda id: False,
) -> Archive:
    """Look at all of an archive. `present` tells which layers and images need no room because they
    are on this disk already.

    Raises ArchiveInvalid, StoreKeyInvalid (encrypted and the secret is missing or another),
    InvalidRequest (no secret could be like that), Interrupted.
    """
    if secret is not None:
        clean_secret(secret)
    with refusing():
        try:
            settings, keyring = config.open_existing(reader, secret)
        except StoreKeyInvalid as error:
            raise StoreKeyInvalid(
                error.message.replace("repository", "archive"),
                next_step="Give the key it was exported with (--key-file), and none otherwise.",
            ) from None
        repository = Repository(reader, settings, keyring)
        return Archive(repository, reader, check_archive(reader, repository, present))


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Say of what is wrong inside an archive that the archive is."""
    try:
        yield
    except ArchiveInvalid:
        raise
    except (IntegrityError, NotFound, Unsupported, Conflict, InvalidRequest) as error:
        raise ArchiveInvalid(
            f"The archive is damaged or forged: {error.message}", cause=error.code
        ) from error
