"""One object store, opened: pushing snapshots into it and reading them back.

Guarantee: `push` returns only when everything a snapshot needs is acknowledged by the store and no
collection under way can take it; it may be cut off anywhere and called again, and sends again
nothing that the store's indexes know. Reading verifies everything against the ids it asked for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sojourn.errors import (
    Conflict,
    IntegrityError,
    ObjectMissing,
    SnapshotNotFound,
    StaleEpoch,
)
from sojourn.model import SessionState
from sojourn.model.snapshots import MemoryRef, Snapshot
from sojourn.repository.backends.base import Backend, ObjectInfo
from sojourn.repository.config import Config
from sojourn.repository.damages import read_damages
from sojourn.repository.domains import Domain
from sojourn.repository.images_in import read_image, restore_image
from sojourn.repository.keys import Keyring
from sojourn.repository.layers_in import restore_layer
from sojourn.repository.opened import OpenedRepository
from sojourn.repository.pushes import Copies, Push
from sojourn.repository.reliance import Watch
from sojourn.repository.session_records import (
    SESSION,
    SNAPSHOT,
    TENANT,
    SessionRecord,
    TenantRecord,
    decode_session,
    decode_snapshot,
    decode_tenant,
)
from sojourn.repository.uploads import adopt_unindexed
from sojourn.store.manifests import Manifest

log = logging.getLogger(__name__)

SHARED = "shared"
TENANTS = "tenants"
_TRIES = 10


class Repository(OpenedRepository):
    """An opened repository that snapshots go into and come back from. Methods may be called from
    many threads."""

    def __init__(self, backend: Backend, settings: Config, keyring: Keyring) -> None:
        super().__init__(backend, settings, keyring)
        self._watches: dict[str, Watch] = {}
        self._pushing = threading.Lock()

    # -- out --------------------------------------------------------------------------------

    def push(
        self, tenant: str, snapshot: Snapshot, copies: Copies, parent: Snapshot | None = None
    ) -> int:
        """Make a snapshot durable; answers the bytes sent. `parent` is one whose memory image is
        likely to share pages.

        Raises IntegrityError (what lies on this node is not what was sealed), StoreUnreachable,
        StorageFull, Interrupted; the store then lacks the snapshot and nothing older is touched.
        """
        with self._pushing:
            return Push(self._watch(tenant), self._watch(SHARED), copies, parent).send(snapshot)

    def _watch(self, name: str) -> Watch:
        watch = self._watches.get(name)
        if watch is None:
            domain = self.domain(name)
            # Once per process: take up what an upload that was cut off had sent.
            adopt_unindexed(domain)
            watch = self._watches[name] = Watch(domain)
        return watch

    def put_tenant(self, record: TenantRecord) -> None:
        """Write a tenant's name down."""
        domain = self.domain(record.id)
        domain.put_object(TENANT, _tenant_key(record.id), msgspec.msgpack.encode(record))

    def put_session(self, record: SessionRecord, *, take_over: bool = False) -> None:
        """Write a session's record. Raises StaleEpoch when the store has one of a later epoch, or
        of another owner and this is not to `take_over`: another database has the session now."""
        session = record.session
        domain = self.domain(session.tenant)
        key = domain.session_key(session.id)
        payload = msgspec.msgpack.encode(record)
        for _ in range(_TRIES):
            stored, version = self._stored_session(domain, session.id)
            if stored is not None:
                epoch = stored.session.epoch
                taken = stored.session.state is SessionState.DELETED or (
                    stored.owner != record.owner and not take_over
                )
                if taken or epoch > session.epoch:
                    raise StaleEpoch(
                        f"session {session.id} was deleted or taken over by another server (epoch"
                        f" {epoch} in the object store, {session.epoch} here)",
                        next_step="Delete it here, or stop this server: the other one has it now.",
                        session=session.id,
                        epoch=epoch,
                        expected=session.epoch,
                    )
            try:
                domain.put_object(SESSION, key, payload, create=version is None, replaces=version)
                return
            except Conflict:
                continue  # written by another server just now: look at its epoch
        raise Conflict(f"the record of session {session.id} is being written by others")

    def stored_session(self, tenant: str, session: str) -> tuple[SessionRecord | None, str | None]:
        """A session's record that is there, if it can be read, and its version: for whoever reads
        it before what it is to say, and then calls `replace_session`."""
        return self._stored_session(self.domain(tenant), session)

    def replace_session(self, record: SessionRecord, version: str | None) -> None:
        """Write a session's record in place of the one of this version (None: of none). Raises
        Conflict when another one was written meanwhile."""
        domain = self.domain(record.session.tenant)
        key = domain.session_key(record.session.id)
        payload = msgspec.msgpack.encode(record)
        domain.put_object(SESSION, key, payload, create=version is None, replaces=version)

    def _stored_session(
        self, domain: Domain, session: str
    ) -> tuple[SessionRecord | None, str | None]:
        """A session's record that is there, if it can be read, and its version. A damaged one is of
        no use to anybody: whoever has the session may put a whole one in its place."""
        key = domain.session_key(session)
        try:
            payload, version = domain.read_object(SESSION, key)
            return decode_session(payload, session), version
        except ObjectMissing:
            return None, None
        except IntegrityError as error:
            log.warning("the record of session %s is written anew: %s", session, error.message)
        try:
            return None, domain.backend.head(key).version
        except ObjectMissing:
            return None, None

    def delete_session(self, tenant: str, session: str) -> None:
        """Let a session's record say that it was deleted, and nothing else. It stays: snapshots
        that are still to be removed must not be taken for those of a session whose record is lost,
        and no older server may write the record again. Idempotent."""
        domain = self.domain(tenant)
        key = domain.session_key(session)
        for _ in range(_TRIES):
            found, version = self._stored_session(domain, session)
            if found is None:
                domain.backend.delete([key])  # one that nobody can read says nothing
                return
            if found.session.state is SessionState.DELETED:
                return
            gone = msgspec.structs.replace(
                found.session,
                state=SessionState.DELETED,
                head=None,
                name=None,
                labels={},
                env={},
            )
            record = msgspec.structs.replace(found, session=gone, snapshots=[])
            try:
                domain.put_object(SESSION, key, msgspec.msgpack.encode(record), replaces=version)
                return
            except Conflict:
                continue
        raise Conflict(f"the record of session {session} is being written by others")

    def delete_snapshot(self, tenant: str, snapshot: str) -> None:
        """Forget a snapshot; what only it needed goes with the next collection. Idempotent."""
        domain = self.domain(tenant)
        domain.backend.delete([domain.snapshot_key(snapshot)])

    # -- in ---------------------------------------------------------------------------------

    def tenants(self) -> Iterator[TenantRecord]:
        """Every tenant that ever sent something. Raises IntegrityError."""
        for tenant in self.tenant_ids():
            yield self.read_tenant(tenant)

    def tenant_ids(self) -> list[str]:
        """The tenants with a record, readable or not."""
        return [_last(info) for info in self.backend.list(f"{TENANTS}/")]

    def read_tenant(self, tenant: str) -> TenantRecord:
        """A tenant's record. Raises ObjectMissing, IntegrityError."""
        payload = self.domain(tenant).get_object(TENANT, _tenant_key(tenant))
        return decode_tenant(payload, tenant)

    def session_ids(self, tenant: str) -> list[str]:
        """The sessions with a record."""
        return [_last(info) for info in self.domain(tenant).ids("sessions")]

    def snapshot_ids(self, tenant: str) -> list[str]:
        """The snapshots of a tenant, readable or not."""
        return [_last(info) for info in self.domain(tenant).ids("snapshots")]

    def read_session(self, tenant: str, session: str) -> SessionRecord:
        """A session's record. Raises ObjectMissing, IntegrityError."""
        domain = self.domain(tenant)
        return decode_session(domain.get_object(SESSION, domain.session_key(session)), session)

    def read_snapshot(self, tenant: str, snapshot: str) -> Snapshot:
        """A snapshot's manifest, proven by its fingerprint. Raises SnapshotNotFound,
        IntegrityError."""
        domain = self.domain(tenant)
        try:
            payload = domain.get_object(SNAPSHOT, domain.snapshot_key(snapshot))
        except ObjectMissing:
            raise SnapshotNotFound(
                f"the object store has no snapshot {snapshot}", snapshot=snapshot
            ) from None
        return decode_snapshot(payload, snapshot)

    def damages(self, tenant: str) -> dict[str, list[str]]:
        """What a repair had to give up for lost, by snapshot. Raises IntegrityError."""
        found = read_damages(self.domain(tenant))
        return {id: damage.objects for id, damage in found.items()}

    def fetch_layer(self, domain: str, layer: str, into: Path) -> Manifest:
        """Make a layer's tree at `into`, proven. Raises IntegrityError, StoreUnreachable,
        StorageFull."""
        return restore_layer(self.domain(domain), layer, into)

    def fetch_image(
        self, domain: str, image: str, into: Path, cached: Sequence[tuple[MemoryRef, Path]] = ()
    ) -> MemoryRef:
        """Make a memory image's files in `into`, proven. Pages that a cached image has come from
        there. Raises IntegrityError, StoreUnreachable, StorageFull."""
        place = self.domain(domain)
        maps = []
        for ref, files in cached:
            # Only a saving: an image whose map cannot be had is not used as a cache.
            with contextlib.suppress(ObjectMissing, IntegrityError):
                maps.append((read_image(place, ref.id), files))
        return restore_image(place, image, into, maps)


def _tenant_key(tenant: str) -> str:
    return f"{TENANTS}/{tenant}"


def _last(info: ObjectInfo) -> str:
    return info.key.rpartition("/")[2]
