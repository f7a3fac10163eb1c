"""The templates that sessions can start from: those of the node, and those that were built.

Guarantee: a version of a built template is a snapshot like any other and never changes; `NAME` is
the newest version there is, `NAME@2` that one or none. A tenant's templates are its own; those of
the node are everyone's, and nobody can build one of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from sojourn.database.base import Database
from sojourn.database.records import SnapshotRecord
from sojourn.errors import TemplateNotFound, UnknownTemplate
from sojourn.model import LayerRef, MemoryRef, Session, SessionKind
from sojourn.model.snapshots import SnapshotConfig
from sojourn.server.manifests import Manifests
from sojourn.wire.api import TemplateInfo

LAST = "last"
"""The label of a template's session that tells its last version's number: none is used again."""

STEP = "step-"
"""How the label of a snapshot begins that a step of a Containerfile left: no version, yet what a
session can start from."""

_REFERENCE = re.compile(r"([^@]+)@([1-9][0-9]{0,8}|step-[0-9a-f]{64})")


class Template(msgspec.Struct, frozen=True):
    """What a session can start from. Of a built one `config` says how, and `layers` are all of its
    layers, the lowest of which is `layer`; `name` is then NAME@VERSION."""

    name: str
    layer: LayerRef
    created_at: float
    layers: list[LayerRef] = []
    memory: MemoryRef | None = None
    config: SnapshotConfig | None = None


def split_reference(ref: str) -> tuple[str, str | None]:
    """Name and label of `NAME` or `NAME@VERSION`."""
    found = _REFERENCE.fullmatch(ref)
    return (found[1], found[2]) if found else (ref, None)


class Catalog:
    """Looks templates up."""

    def __init__(self, database: Database, manifests: Manifests, node: Iterable[Template]) -> None:
        self._database = database
        self._manifests = manifests
        self.node = {template.name: template for template in node}

    async def find(self, tenant: str, ref: str) -> Template:
        """What a session of a tenant that asks for `ref` starts from. Raises UnknownTemplate,
        IntegrityError."""
        name, version = split_reference(ref)
        if version is None and name in self.node:
            return self.node[name]
        try:
            _, record = await self.version(tenant, name, version)
        except TemplateNotFound as error:
            known = ", ".join(sorted(await self._names(tenant)))
            raise UnknownTemplate(f"{error.message} (known: {known})", field="template") from error
        snapshot = await self._manifests.read(record.id)
        return Template(
            name=f"{name}@{record.label}",
            layer=snapshot.layers[0],
            created_at=snapshot.created_at,
            layers=snapshot.layers,
            memory=snapshot.memory,
            config=snapshot.config,
        )

    async def _names(self, tenant: str) -> list[str]:
        return [*self.node, *(one.name or "" for one in await self.built(tenant))]

    async def built(self, tenant: str | None) -> list[Session]:
        """The sessions that hold a tenant's templates."""
        found: list[Session] = []
        cursor: str | None = None
        while True:
            page = await self._database.list_sessions(
                tenant, limit=500, after=cursor, kind=SessionKind.TEMPLATE
            )
            found += page.items
            cursor = page.next
            if cursor is None:
                return found

    async def versions(self, template: Session) -> list[SnapshotRecord]:
        """A template's versions, oldest first."""
        records = await self._database.list_snapshots(template.id)
        found = [one for one in records if one.label is not None and one.label.isdigit()]
        return sorted(found, key=lambda one: int(one.label or "0"))

    async def version(
        self, tenant: str, name: str, label: str | None
    ) -> tuple[Session, SnapshotRecord]:
        """A template's session and the version that is meant. Raises TemplateNotFound."""
        template = await self._database.get_template(tenant, name)
        versions = await self.versions(template)
        if label is None and versions:
            return template, versions[-1]
        for record in await self._database.list_snapshots(template.id):
            if record.label == label:
                return template, record
        there = ", ".join(record.label or "" for record in versions)
        raise TemplateNotFound(
            f"template {name!r} has no version {label or ''} (it has {there or 'none'})",
            template=name,
        )

    # -- as the API shows them --------------------------------------------------------------

    async def list(self, tenant: str) -> list[TemplateInfo]:
        """Every template: those of the node, and the newest version of each of the tenant's."""
        found = [self._node_info(template) for template in self.node.values()]
        for template in sorted(await self.built(tenant), key=lambda one: one.name or ""):
            versions = await self.versions(template)
            if versions:
                found.append(await self.info(template, versions[-1], versions))
        return found

    async def show(self, tenant: str, ref: str) -> TemplateInfo:
        """One template's version. Raises TemplateNotFound."""
        name, version = split_reference(ref)
        if version is None and name in self.node:
            return self._node_info(self.node[name])
        template, record = await self.version(tenant, name, version)
        return await self.info(template, record, await self.versions(template))

    def _node_info(self, template: Template) -> TemplateInfo:
        return TemplateInfo(
            name=template.name,
            layer=template.layer.id,
            bytes=template.layer.bytes,
            created_at=template.created_at,
        )

    async def info(
        self, template: Session, record: SnapshotRecord, versions: Iterable[SnapshotRecord]
    ) -> TemplateInfo:
        """A version as the API shows it. Raises IntegrityError."""
        snapshot = await self._manifests.read(record.id)
        config, image = snapshot.config, snapshot.config.image
        return TemplateInfo(
            name=template.name or "",
            layer=snapshot.layers[0].id,
            bytes=sum(layer.bytes for layer in snapshot.layers),
            created_at=snapshot.created_at,
            version=int(label) if (label := record.label or "").isdigit() else None,
            versions=[int(one.label or "0") for one in versions],
            layers=len(snapshot.layers),
            memory=record.has_memory,
            memory_bytes=record.memory_bytes,
            source=image.source if image else "",
            digest=image.digest if image else None,
            env=config.env,
            user=config.user,
            cwd=config.cwd,
            entrypoint=image.entrypoint if image else [],
            cmd=image.cmd if image else [],
            start=image.start if image else False,
            labels=image.labels if image else {},
            left_out=image.left_out if image else 0,
            durable_at=record.durable_at,
        )
