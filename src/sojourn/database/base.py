"""What every database promises.

Guarantee: the database alone owns consistency. Every change of a session's state is one
compare-and-swap on (state, epoch), so a writer that acts for an older placement is refused; what
was acknowledged survives a power cut, except where a method says otherwise; what belongs together
is committed together or not at all; the same request with the same key happens once.

With a fence (`Database.fence`) it is the database of one node: each change checks, in its own
transaction, that this incarnation of the node still counts, and raises NodeFenced otherwise; from
then on every change does, until there is a new fence. Leases are measured by the database's clock.
`holder=None`, `node=None` and `server=None` in a question mean all; an empty holder nobody.

All methods are called on one event loop. Every method may raise StorageFull (nothing was changed),
IntegrityError (the database file is damaged) and Unreachable (it is locked or gone).
`tenant=None` means the operator's view: any tenant.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from sojourn.database.records import (
    Durability,
    DurableObjects,
    EffectRecord,
    Event,
    ObjectStore,
    Operation,
    Pruned,
    References,
    Removal,
    Role,
    SecretRecord,
    SessionPage,
    SnapshotRecord,
    Tenant,
    Token,
)
from sojourn.database.writes import AppendEvent, Write
from sojourn.errors import ErrorBody
from sojourn.model.nodes import FailedOver, Fence, Node, NodeState, Resources
from sojourn.model.ports import ExposedPort
from sojourn.model.sessions import Session, SessionKind, SessionState

KEY_LIFETIME = 24 * 3600.0  # seconds an idempotency key is remembered


class Database(Protocol):
    """One database. `sojourn.database.open_database` gives an open one."""

    async def close(self) -> None:
        """Write what is pending and let go. Idempotent."""

    async def own(self) -> None:
        """From now on this is the server of the database, until it is closed. Raises HostUnfit when
        another one is; where the database lies in a data directory, its lock says so already."""

    def fence(self, fence: Fence) -> None:
        """From now on all changes are made in the name of this incarnation of a node."""

    def tell_node(self, node: str, session: str) -> None:
        """Tell a node's process that it should look at a session. A hint: it may be lost, and is
        where several processes cannot hear each other."""

    def hear_node(self, node: str, heard: Callable[[str | None], None]) -> None:
        """From now on call `heard` on the loop with the sessions that this node is told of; None:
        with anything that may have been missed."""

    # -- changes ----------------------------------------------------------------------------
    async def commit(self, writes: Sequence[Write], *, durable: bool = True) -> list[Any]:
        """Apply all in order, in one transaction, or none; one result per write.

        With `durable=False` the change survives the end of the process by whatever cause, but a
        power cut may take it (never out of order: a later durable commit secures it too).
        """

    # -- sessions ---------------------------------------------------------------------------
    async def get_session(self, tenant: str | None, id_or_name: str) -> Session:
        """A live session by its name, or of whatever kind by its id. Raises SessionNotFound, also
        for deleted ones."""

    async def get_template(self, tenant: str, name: str) -> Session:
        """The session that holds a template's versions. Raises TemplateNotFound."""

    async def list_sessions(
        self,
        tenant: str | None,
        *,
        states: Collection[SessionState] | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int = 100,
        after: str | None = None,
        kind: SessionKind | None = SessionKind.SESSION,
        holder: str | None = None,
    ) -> SessionPage:
        """Newest first, of one kind or all, live ones unless `states` asks for deleted ones; all
        given labels must match. `after` is the `next` of the page before; sessions that come and
        go in between neither repeat nor hide others. Raises InvalidRequest for a bad cursor."""

    async def count_sessions(
        self, tenant: str | None = None, *, holder: str | None = None
    ) -> dict[SessionState, int]:
        """How many sessions are in each state (every state is a key); templates are none. Of a
        hundred thousand and more it may tell how many there were ten seconds ago."""

    # -- deadlines --------------------------------------------------------------------------
    def touch_idle(self, session: str, deadline: float) -> None:
        """Move a session's idle deadline out, never in. Cheap: remembered at once, written at most
        once a second per session, so a crash loses at most the last second's move. Without effect
        on a session that has no idle deadline. Reads through this object see it at once."""

    async def due_sessions(
        self, now: float, *, limit: int = 100, holder: str | None = None
    ) -> list[Session]:
        """Sessions something must happen to: running or paused ones with a deadline that has come,
        and suspended or failed ones whose lifetime is over and whose policy says delete."""

    # -- snapshots --------------------------------------------------------------------------
    async def get_snapshot(
        self, tenant: str | None, id: str, *, hidden: bool = False
    ) -> SnapshotRecord:
        """Raises SnapshotNotFound; hidden ones are found only when asked for."""

    async def list_snapshots(self, session: str) -> list[SnapshotRecord]:
        """The session's tree without hidden ones, oldest first, parents before children."""

    async def update_snapshot(self, id: str, **changes: Any) -> SnapshotRecord:
        """See `writes.UpdateSnapshot`."""

    async def delete_snapshot(self, id: str) -> bool:
        """See `writes.DeleteSnapshot`."""

    async def removable_snapshots(self, *, holder: str | None = None) -> list[SnapshotRecord]:
        """Hidden ones that no live session has as its head, and all of deleted sessions that no
        live session descends from; not the newest durable one before a head that is not durable
        yet. Removing them may make others removable. With a holder those of sessions that it or
        nobody holds."""

    async def anchored_snapshots(self, session: str) -> set[str]:
        """Those of the session's snapshots that a live session, this or another, has as its head
        or was forked from."""

    async def references(self, *, holder: str | None = None) -> References:
        """All layer and image ids any snapshot row refers to. With a holder what that node's disk
        must keep: those of snapshots of the sessions it holds and of their heads, and of what the
        object store does not have yet and only this disk has."""

    # -- the object store -------------------------------------------------------------------
    async def object_store(self) -> ObjectStore | None:
        """The object store that the marks of what is durable speak of; None before the first."""

    async def use_object_store(self, store: ObjectStore) -> bool:
        """From now on they speak of this one. Where it is another repository than before, nothing
        counts as durable any more and no removal is owed; answers whether that is so."""

    async def undurable_snapshots(
        self, *, limit: int = 100, node: str | None = None
    ) -> list[SnapshotRecord]:
        """Needed ones that the object store does not have yet: heads of live sessions first, then
        the others, oldest first; within each of the two, parents before children. Needed are the
        visible snapshots of sessions that are not deleted, and whatever is the head of one. With a
        node those that its disk has, whoever holds the session now."""

    async def mark_durable(self, id: str, *, fingerprint: str, at: float) -> bool:
        """Set `durable_at` of a snapshot that still has this fingerprint; answers whether it has.
        False: it was thinned or removed while it was sent. Not durable by itself: a power cut may
        take it, then the snapshot is looked for in the object store again."""

    async def store_removals(self, *, limit: int = 1000) -> list[Removal]:
        """What was removed here since, oldest first: snapshots whose row is deleted and sessions
        that became `deleted`, whether the object store had them or not."""

    async def forget_removals(self, ids: Collection[int]) -> None:
        """The object store has them no more. Not durable by itself: they may come again."""

    async def durable_objects(self, *, holder: str | None = None) -> DurableObjects:
        """What the object store must have, by the snapshots that are durable; with a holder by
        those of the sessions it holds, and their heads."""

    async def record_digest(self, session: str) -> str | None:
        """What `note_record` last noted about the session, as long as its row is there."""

    async def note_record(self, session: str, digest: str) -> None:
        """Remember what was written to the object store about a session. Not durable by itself.
        Raises SessionNotFound when there is no row of it, not even a deleted one."""

    async def durability(
        self,
        tenant: str | None,
        *,
        holder: str | None = None,
        session: str | None = None,
        waiting: bool = False,
    ) -> list[Durability]:
        """One per session that is not deleted and has a snapshot, oldest session first; of one
        session, or only of those with snapshots that are needed and not durable, which takes as
        long as there are such."""

    # -- operations -------------------------------------------------------------------------
    async def begin(
        self,
        *,
        tenant: str,
        session: str,
        verb: str,
        request: dict[str, Any],
        server: str,
        id: str | None = None,
        key: str | None = None,
        exclusive: bool = True,
        supersede: bool = False,
        creates: bool = False,
        also: Sequence[Write] = (),
        holder: str | None = None,
    ) -> tuple[Operation, bool]:
        """Begin an operation, durably; answers (operation, whether it is new).

        With a `key` seen within 24 hours for the same verb, session and request, the stored
        operation is answered and nothing changes, also when many try at once; for another request
        IdempotencyMismatch is raised. `creates` leaves the session's id out of that comparison
        (the caller makes a new id for each try). `also` is applied in the same transaction, only
        when new, before the operation is inserted; give `id` when it must name the operation.
        An `exclusive` operation is the session's only unfinished one: else SessionBusy is raised,
        with details `operation` and `verb`; with `supersede` the unfinished one is instead failed
        with Interrupted in the same transaction (delete must work from every state), unless it is
        of the same verb. With `holder` SessionElsewhere is raised, before SessionBusy, where the
        session is not this node's; a stored operation is answered all the same.
        """

    async def set_step(
        self, operation: str, step: str, data: dict[str, Any] | None = None
    ) -> Operation:
        """See `writes.SetStep`. Durable."""

    async def finish(
        self, operation: str, result: Any = None, *, error: ErrorBody | None = None
    ) -> Operation:
        """See `writes.FinishOperation`. Durable."""

    async def get_operation(self, tenant: str | None, id: str) -> Operation:
        """Raises OperationNotFound."""

    async def keyed_operation(self, tenant: str, key: str) -> Operation | None:
        """The operation an idempotency key stands for, as long as the key is remembered."""

    async def unfinished_operations(self, *, server: str | None = None) -> list[Operation]:
        """Oldest first."""

    async def claim(self, server: str, *, before: float, limit: int = 100) -> list[Operation]:
        """Take over unfinished operations of other servers that were not touched since `before`,
        oldest first: from now on they are `server`'s. Of many that claim at once each gets others,
        and none waits for another."""

    # -- events -----------------------------------------------------------------------------
    def append_event(self, event: AppendEvent, *, durable: bool = False) -> asyncio.Future[int]:
        """Append at once; the future gives the sequence number when it is written. In the order of
        calls. Without `durable` as `commit(durable=False)`: for turns, off the sync path."""

    async def list_events(
        self, session: str, *, after: int = 0, limit: int = 1000, kinds: Collection[str] = ()
    ) -> list[Event]:
        """Events with a greater sequence number, in order."""

    def follow_events(self, session: str, *, after: int = 0) -> AsyncIterator[Event]:
        """All events from there on, in order, without a gap, waiting for new ones for ever."""

    # -- effects ----------------------------------------------------------------------------
    async def list_effects(
        self,
        session: str,
        *,
        all: bool = False,
        after: tuple[float, str] | None = None,
        limit: int = 1000,
    ) -> list[EffectRecord]:
        """What left a session, oldest first: the lasting ones, or all. `after` is the time and id
        of the last one of the page before."""

    async def open_effects(
        self, *, limit: int = 1000, holder: str | None = None
    ) -> list[EffectRecord]:
        """Those of any session whose end is not recorded, oldest first."""

    async def effects_between(
        self, base: str, tip: str | None, *, session: str | None = None, limit: int = 1000
    ) -> tuple[list[EffectRecord], int]:
        """The lasting ones that happened on the way to snapshot `tip` and not on the way to `base`,
        with `session` also what it did since its last snapshot: what a change from the one to the
        other leaves behind. Oldest first, and how many there are in all."""

    # -- tenants and tokens -----------------------------------------------------------------
    async def create_tenant(self, name: str, *, id: str | None = None) -> Tenant:
        """A new tenant, or with `id` one that is restored. Raises NameTaken, Conflict when the id
        is in use."""

    async def get_tenant(self, id_or_name: str) -> Tenant:
        """Raises NotFound."""

    async def list_tenants(self) -> list[Tenant]: ...

    async def create_token(
        self, tenant: str, role: Role, *, label: str | None = None, secret: str | None = None
    ) -> tuple[Token, str]:
        """A new token and its secret, which cannot be read again. `secret` registers a given one
        (at least 32 characters)."""

    async def verify_token(self, secret: str) -> Token:
        """Raises Unauthenticated when it is unknown or revoked."""

    async def revoke_token(self, id: str) -> bool:
        """Takes effect at once; answers whether it was valid before."""

    async def list_tokens(self, tenant: str | None = None) -> list[Token]: ...

    # -- secrets and exposed ports ----------------------------------------------------------
    async def put_secret(self, secret: SecretRecord) -> SecretRecord:
        """Keep a secret, in place of the tenant's one of that name; as it is kept then."""

    async def list_secrets(self, tenant: str) -> list[SecretRecord]:
        """A tenant's secrets, by name."""

    async def delete_secret(self, tenant: str, name: str) -> bool:
        """Answers whether there was one."""

    async def anything_sealed(self) -> bool:
        """Whether there is a secret or a token of a port, which only their key opens."""

    async def put_port(self, port: ExposedPort) -> ExposedPort:
        """Expose a port; the one that is there already where it is exposed. Raises
        SessionNotFound, and Conflict where another exposed port has its `listens_at`."""

    async def list_ports(
        self, session: str | None = None, *, holder: str | None = None
    ) -> list[ExposedPort]:
        """Exposed ports of a session, or all. Those of deleted sessions are gone."""

    async def delete_port(self, session: str, port: int) -> bool:
        """Answers whether it was exposed."""

    # -- nodes ------------------------------------------------------------------------------
    async def add_node(
        self,
        id: str,
        name: str,
        *,
        address: str = "",
        labels: Mapping[str, str] | None = None,
        taints: Sequence[str] = (),
    ) -> Node:
        """A node that has joined and not started yet: ready, without a lease. Raises NameTaken,
        Conflict when the id is in use."""

    async def start_node(
        self,
        id: str,
        *,
        address: str,
        capacity: Resources,
        runtime: str | None,
        cpu: Sequence[str],
        version: str,
        lease: float,
        labels: Mapping[str, str] | None = None,
        taints: Sequence[str] | None = None,
    ) -> Node:
        """A new incarnation of a node, with a lease of so many seconds; what the one before has
        under way is committed or refused when this returns. What it holds stays its own, also when
        it was lost and not all was taken from it yet. Its state stays; labels and taints, too,
        where none are given. Raises NodeNotFound."""

    async def renew_node(
        self, fence: Fence, *, lease: float, used: Resources | None = None
    ) -> Node:
        """A lease of so many seconds from now on. Waits neither for other changes nor long for the
        database. Raises NodeFenced, also once the lease had ended, if the node was fenced since."""

    async def stop_node(self, fence: Fence) -> None:
        """The lease ends now. Raises NodeFenced."""

    async def list_nodes(self) -> list[Node]:
        """All that are not removed, by name."""

    async def get_node(self, id_or_name: str) -> Node:
        """Raises NodeNotFound, also for removed ones."""

    async def set_node_state(self, id_or_name: str, state: NodeState) -> Node:
        """A removed node is fenced and lost at once, and never starts again. Raises
        NodeNotFound."""

    async def add_node_token(
        self, id: str, digest: str, *, expires_at: float, labels: Mapping[str, str] | None = None
    ) -> None:
        """Let one node join with a secret of this digest."""

    async def use_node_token(self, id: str, digest: str) -> dict[str, str]:
        """Its labels; it can be used once. Raises Unauthenticated."""

    async def cluster_value(self, name: str) -> bytes | None: ...

    async def replace_cluster_value(self, name: str, value: bytes) -> None:
        """The value that is kept from now on, whatever was."""

    async def put_cluster_value(self, name: str, value: bytes) -> bytes:
        """The value that is kept from now on: of several the first one."""

    async def hold_duty(self, name: str, node: str, *, lease: float) -> bool:
        """Whether the node has a duty for so many seconds from now on that one node at a time has:
        it had it, or nobody did."""

    async def take_session(self, id: str, fence: Fence, epoch: int) -> Session:
        """Hold a session that nobody holds, with its epoch grown; answers it again when the node
        took it already. Raises SessionNotFound, SessionElsewhere, StaleEpoch, WrongState (it is
        neither suspended nor failed), NodeFenced."""

    async def release_session(
        self, id: str, fence: Fence, epoch: int, *, within: str | None = None
    ) -> Session:
        """Let any node take a session, with its epoch grown; an operation that does so (`within`)
        succeeds in the same transaction. Raises SessionNotFound, SessionElsewhere, StaleEpoch,
        WrongState (it is neither suspended nor failed), SessionBusy, Conflict (its head is not
        durable), NodeFenced."""

    async def lose_node(self, grace: float, *, within: float | None = None) -> Node | None:
        """Fence a node whose lease ended more than `grace` seconds ago, and mark it lost; or one
        that is lost and still has sessions or operations. Waits for what it has under way. None
        when there is no such node, and when this did not begin `within` so many seconds: then the
        database was away, and leases may have ended for that alone."""

    async def fail_over(self, node: str, limit: int = 100) -> list[FailedOver]:
        """Take so many sessions from a lost node, the live ones before the suspended ones, and end
        its operations; of many that do it at once each gets others. Each session is suspended at
        the newest snapshot on its line that the object store has, failed where there is none,
        deleted where that was under way; its epoch has grown and nobody holds it. An empty list:
        nothing is left, or others are at it, or the node started again."""

    # -- identity and retention -------------------------------------------------------------
    async def server_id(self) -> str:
        """The id of this installation, made at the first call and kept."""

    async def prune(
        self, now: float, *, operations_after: float = 7 * 86400.0, sessions_after: float = 86400.0
    ) -> Pruned:
        """Drop finished operations older than `operations_after` seconds that no valid key names,
        expired keys, and deleted sessions (older than `sessions_after`) without snapshots."""
