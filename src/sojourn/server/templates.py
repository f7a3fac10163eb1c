"""Building templates: from images, and from sessions.

Guarantee: a version is there when all of it is on disk, by one commit; what is refused or cut off
leaves nothing. Versions are numbered 1, 2, ... and no number of a template is used again. Sessions
keep what they were made of: a version that is removed is gone for who would start from it, and what
sessions need of it stays until they are gone.

What a template carries into other sessions is what its session held: so memory is not taken of one
that was granted secrets or can be reached with a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from sojourn import faultpoints
from sojourn.database.records import SnapshotRecord
from sojourn.database.writes import (
    AppendEvent,
    InsertSession,
    InsertSnapshot,
    UpdateSession,
    UpdateSnapshot,
    Write,
)
from sojourn.errors import (
    CaptureRefused,
    ImageInvalid,
    InvalidRequest,
    NameTaken,
    SojournError,
    StaleEpoch,
    TemplateNotFound,
)
from sojourn.images.archives import open_archive
from sojourn.images.documents import ImageDocument, host_platform
from sojourn.images.unpacking import LONG_CHAIN, Unpacked, Unpacker
from sojourn.lifecycle import Command, Verb, decide
from sojourn.model import (
    LayerRef,
    MemoryRef,
    Policy,
    Session,
    SessionKind,
    SessionState,
    SnapshotKind,
    new_id,
    without_sandbox,
)
from sojourn.model.snapshots import ImageConfig, SnapshotConfig
from sojourn.node import captures
from sojourn.node.isolation.base import Capability
from sojourn.server.base import Principal
from sojourn.server.catalog import LAST, STEP, split_reference
from sojourn.server.checks import check_map, check_name, check_place
from sojourn.server.context import Context
from sojourn.server.imports import receive, spare_room
from sojourn.server.operations import Run
from sojourn.server.placements import Placements
from sojourn.server.registry import ActiveSession
from sojourn.server.snapshots import Snapshots
from sojourn.server.threads import in_thread
from sojourn.store.copying import disk_errors
from sojourn.wire.api import TemplateInfo, TemplateRequest

_STEP_KEY = re.compile(r"[0-9a-f]{64}")
_KEPT_STEPS = 200
_MAX_WORDS = 64 * 1024
_AT_ONCE = 2  # a tree being unpacked is held in memory
# One whose newest version was lost with a node is failed: it is built anew, or removed.
_STATES = {SessionState.SUSPENDED, SessionState.FAILED}


class Built(msgspec.Struct, frozen=True):
    """What a version is made of, all of it in the store."""

    layers: list[LayerRef]
    memory: MemoryRef | None
    config: SnapshotConfig
    driver: str


class Templates:
    """Builds and removes templates."""

    def __init__(self, context: Context, snapshots: Snapshots, placements: Placements) -> None:
        self._context = context
        self._snapshots = snapshots
        self._placements = placements
        # By tenant and name, as long as somebody holds or awaits one.
        self._publishing: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._unpacking = asyncio.Semaphore(_AT_ONCE)

    # -- from an image ----------------------------------------------------------------------

    async def build(
        self,
        who: Principal,
        name: str,
        chunks: AsyncIterator[bytes],
        *,
        tag: str | None,
        source: str | None,
        start: bool,
    ) -> TemplateInfo:
        """Make a version of an image that comes as a tar, in pieces.

        Raises ImageInvalid, NameTaken, InvalidRequest, TooLarge, StorageFull."""
        self._check_name(name)
        if source is not None and not (len(source) <= 1000 and source.isprintable()):
            raise InvalidRequest("source is over 1000 characters", field="source")
        root = self._context.store.root
        with disk_errors("receiving an image"):
            file = tempfile.TemporaryFile(dir=root, buffering=0)  # noqa: SIM115 - closed below
        held = contextlib.ExitStack()
        stop = threading.Event()
        try:
            await receive(file, chunks, root)
            faultpoints.reach("template.received")

            def unpack() -> tuple[Unpacked, ImageDocument, str | None]:
                image = open_archive(file, tag, host_platform())
                config_of(image.document, name, source or "an archive", image.digest, start)
                unpacker = Unpacker(self._context.store, lambda: spare_room(root), stop)
                found = unpacker.unpack(
                    image, lambda id: held.enter_context(self._context.store.held([id]))
                )
                return found, image.document, image.digest

            async with self._unpacking:
                found, document, digest = await in_thread(unpack, stop)
            faultpoints.reach("template.unpacked")
            config = config_of(document, name, source or "an archive", digest, start)
            assert config.image is not None
            config = msgspec.structs.replace(
                config,
                base_layers=len(found.layers),
                image=msgspec.structs.replace(config.image, left_out=found.left_out),
            )
            built = Built(found.layers, None, config, self._context.agent.default_driver)
            async with self._context.guard.publishing():
                return await self._publish(who.tenant, name, built, who.actor, {})
        finally:
            held.close()
            file.close()

    # -- from a session ---------------------------------------------------------------------

    def check(self, request: TemplateRequest) -> None:
        """Raises InvalidRequest, NameTaken, TooLarge."""
        self._check_name(request.name)
        check_place(request.cwd, request.user)
        check_map("env", request.env or {}, env=True)
        check_map("labels", request.labels or {}, env=False)
        words = [*(request.entrypoint or []), *(request.cmd or [])]
        if sum(map(len, words)) > _MAX_WORDS or any("\0" in word for word in words):
            raise InvalidRequest("entrypoint and cmd cannot be run", field="cmd")
        if request.step is not None and not _STEP_KEY.fullmatch(request.step):
            raise InvalidRequest("step is 64 hexadecimal digits", field="step")

    async def from_session(self, run: Run) -> None:
        """Make a version of a session's present state, which goes on: an operation on it."""
        active = run.active
        request = msgspec.convert(
            {key: value for key, value in run.request.items() if key != "actor"}, TemplateRequest
        )
        async with active.gate.closed("template"):
            decide(active.session, Command(Verb.SNAPSHOT))
            await self._placements.require_held(active)
            async with self._context.guard.publishing():
                built = await self._present(active, request)
                faultpoints.reach("template.captured")
                note = run.event(
                    before=active.session.head,
                    after=active.session.head,
                    name=request.name,
                    memory=built.memory is not None,
                )
                await self._publish(
                    active.session.tenant,
                    request.name,
                    built,
                    run.actor,
                    {"session": active.id},
                    step=request.step,
                    run=run,
                    also=note,
                )

    async def _present(self, active: ActiveSession, request: TemplateRequest) -> Built:
        session = active.session
        memory = request.memory
        if session.live:
            sandbox = self._context.sandbox(active)
            memory = memory and sandbox.has(Capability.LIVE_CHECKPOINT)
            if memory:
                await self._refuse_access(session)
            captured = await captures.capture_live(sandbox, memory=memory)
            layers, image, config = captured.layers, captured.memory, sandbox.record.config
        else:
            head = await self._snapshots.head(session)
            layers, config = head.layers, head.config
            image = head.memory if memory else None
            if image is not None:
                await self._refuse_access(session)
        if len(layers) > LONG_CHAIN:
            # Templates of sessions of templates would grow without end.
            low = min(config.base_layers, LONG_CHAIN - 1)
            layers = await self._snapshots.merged(layers, low)
        return Built(layers, image, _of_session(session, config, request, layers), session.driver)

    async def _refuse_access(self, session: Session) -> None:
        """Raise CaptureRefused where processes may hold what no other session is to have: names
        that stand for secrets, what was fetched with them, or the token of a port."""
        why = None
        if session.network.secrets:
            why = f"it was granted secrets ({', '.join(sorted(session.network.secrets))})"
        elif any(not port.public for port in await self._context.database.list_ports(session.id)):
            why = "it has an exposed port that a token opens"
        if why is not None:
            raise CaptureRefused(
                f"the memory of session {session.name or session.id} is not given to other"
                f" sessions: {why}",
                next_step="Take those away first, or make the template of its files (--cold).",
            )

    # -- publishing -------------------------------------------------------------------------

    def _check_name(self, name: str) -> None:
        check_name(name)
        if name in self._context.catalog.node:
            raise NameTaken(f"{name!r} is a template of the node", name=name)

    async def _publish(
        self,
        tenant: str,
        name: str,
        built: Built,
        actor: str,
        details: dict[str, Any],
        *,
        step: str | None = None,
        run: Run | None = None,
        also: Write | None = None,
    ) -> TemplateInfo:
        """Make what was built the newest version (or, with `step`, what such a step finds)."""
        for last in (False, False, True):
            try:
                return await self._publish_once(
                    tenant, name, built, actor, details, step=step, run=run, also=also
                )
            except (StaleEpoch, NameTaken):
                # Another node made a version of it at the same time: this is the next one.
                if last or self._context.node is None:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _publish_once(
        self,
        tenant: str,
        name: str,
        built: Built,
        actor: str,
        details: dict[str, Any],
        *,
        step: str | None,
        run: Run | None,
        also: Write | None,
    ) -> TemplateInfo:
        lock = self._publishing.setdefault((tenant, name), asyncio.Lock())
        async with lock:
            template = await self._template(tenant, name)
            first = template is None
            template = template or _new_template(tenant, name, built)
            number = int(template.labels.get(LAST, "0")) + (step is None)
            label = f"{STEP}{step}" if step is not None else str(number)
            config = msgspec.structs.replace(
                built.config, template=f"{name}@{number}" if step is None else name
            )
            snapshot = msgspec.structs.replace(
                self._snapshots.manifest(
                    template, config, built.layers, built.memory, SnapshotKind.EXPLICIT, label=label
                ),
                parent=None,
            )
            record = await self._snapshots.publish(snapshot, tenant)
            faultpoints.reach("template.published")
            changes = {
                "head": record.id,
                "labels": template.labels | {LAST: str(number)},
                "state": SessionState.SUSPENDED,
                "cause": None,
            } | self._next_epoch(template)
            made = msgspec.structs.replace(template, **changes)
            records = [] if first else await self._context.catalog.versions(template)
            records += [record] if step is None else []
            info = await self._context.catalog.info(made, record, records)
            session: Write = (
                InsertSession(made)
                if first
                else UpdateSession(template.id, _STATES, template.epoch, changes=changes)
            )
            event = AppendEvent(
                session=template.id,
                kind="template",
                actor=actor,
                result="ok",
                details={"version": number, "source": _source(config), **details},
                after=record.id,
            )
            writes: list[Write] = [session, InsertSnapshot(record), event]
            if run is not None:
                writes.append(run.finish(info))
            if also is not None:
                writes.append(also)
            results = await self._snapshots.refer(writes, [record.id])
        stored = results[0]
        assert isinstance(stored, Session)
        self._context.registry.update(stored)
        for layer in built.layers:
            self._context.agent.trust_template(layer)
        faultpoints.reach("template.commit")
        if step is not None:
            await self._forget_steps(stored)
        return info

    def _next_epoch(self, template: Session) -> dict[str, Any]:
        """Where other nodes may change a template, the swap of one of two at once is refused."""
        return {"epoch": template.epoch + 1} if self._context.node is not None else {}

    async def _template(self, tenant: str, name: str) -> Session | None:
        try:
            return await self._context.database.get_template(tenant, name)
        except TemplateNotFound:
            return None

    # -- steps of Containerfiles ------------------------------------------------------------

    async def _forget_steps(self, template: Session) -> None:
        records = await self._context.database.list_snapshots(template.id)
        steps = [one for one in records if one.label is not None and one.label.startswith(STEP)]
        for record in steps[:-_KEPT_STEPS]:
            if record.id != template.head:
                await self._snapshots.remove(record)

    # -- removing ---------------------------------------------------------------------------

    async def remove(self, who: Principal, ref: str) -> None:
        """Remove a version, or with its name alone a template with all its versions. Sessions that
        were made from it go on. Raises TemplateNotFound, InvalidRequest."""
        name, version = split_reference(ref)
        if name in self._context.catalog.node:
            raise InvalidRequest(
                f"{name!r} is a template of the node",
                next_step="Remove its directory on the node.",
                field="template",
            )
        lock = self._publishing.setdefault((who.tenant, name), asyncio.Lock())
        async with lock:
            template = await self._context.database.get_template(who.tenant, name)
            hidden: list[SnapshotRecord] = []
            if version is not None:
                _, record = await self._context.catalog.version(who.tenant, name, version)
                hidden = [record]
            gone = {record.id for record in hidden}
            versions = await self._context.catalog.versions(template)
            left = [one for one in versions if one.id not in gone]
            changes: dict[str, Any] = {"state": SessionState.DELETED}
            if version is not None and left:
                changes = {"head": left[-1].id, "state": SessionState.SUSPENDED, "cause": None}
            changes |= self._next_epoch(template)
            event = AppendEvent(
                session=template.id,
                kind="template.remove",
                actor=who.actor,
                result="ok",
                details={"version": version},
            )
            results = await self._context.database.commit(
                [
                    UpdateSession(template.id, _STATES, template.epoch, changes=changes),
                    *(UpdateSnapshot(one, {"hidden": True}) for one in sorted(gone)),
                    event,
                ]
            )
        stored = results[0]
        assert isinstance(stored, Session)
        self._context.registry.update(stored)
        self._context.replicator.removed(template.id)
        self._snapshots.collect_soon()


def config_of(
    document: ImageDocument, name: str, source: str, digest: str | None, start: bool
) -> SnapshotConfig:
    """How a session of an image runs. Raises ImageInvalid where that is not possible."""
    told = document.config
    env: dict[str, str] = {}
    for line in (told.env if told else None) or []:
        key, _, value = line.partition("=")
        if key:
            env[key] = value
    cwd = (told.working_dir if told else None) or ""
    image = ImageConfig(
        source=source,
        digest=digest,
        entrypoint=(told.entrypoint if told else None) or [],
        cmd=(told.cmd if told else None) or [],
        labels=(told.labels if told else None) or {},
        start=start,
    )
    # The group of a user is the one the image's own list of users says.
    user = ((told.user if told else None) or "").partition(":")[0] or "root"
    try:
        check_map("env", env, env=True)
        check_map("labels", image.labels, env=True)
        check_place(cwd or None, user)
    except SojournError as error:
        raise ImageInvalid(f"the image's configuration cannot be used: {error.message}") from error
    if sum(map(len, [*image.entrypoint, *image.cmd])) > _MAX_WORDS:
        raise ImageInvalid("the image's entrypoint and command are too long")
    return SnapshotConfig(
        template=name, env=env, user=user, cwd=cwd, hostname="sandbox", image=image
    )


def _of_session(
    session: Session, config: SnapshotConfig, request: TemplateRequest, layers: list[LayerRef]
) -> SnapshotConfig:
    """What sessions made of a session's state start with."""
    old = config.image or ImageConfig(source="")

    def said(value: Any, present: Any) -> Any:
        return present if value is None else value

    image = ImageConfig(
        source=request.source or f"session {session.id}",
        entrypoint=said(request.entrypoint, old.entrypoint),
        cmd=said(request.cmd, old.cmd),
        labels=said(request.labels, old.labels),
        start=said(request.start, old.start),
        step=request.step,
    )
    return msgspec.structs.replace(
        config,
        env=said(request.env, session.env),
        user=said(request.user, config.user),
        cwd=said(request.cwd, config.cwd),
        hostname="sandbox",
        base_layers=len(layers),
        image=image,
    )


def _source(config: SnapshotConfig) -> str:
    return config.image.source if config.image else ""


def _new_template(tenant: str, name: str, built: Built) -> Session:
    """What holds the versions of a new template."""
    return without_sandbox(
        new_id("ses"),
        tenant,
        name=name,
        template=name,
        policy=Policy(idle_timeout=None, retention=None),
        driver=built.driver,
        state=SessionState.SUSPENDED,
        created_at=time.time(),
        kind=SessionKind.TEMPLATE,
    )
