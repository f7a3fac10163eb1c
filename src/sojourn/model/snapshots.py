"""The snapshot: an immutable point in a session's history, described completely by its manifest."""

from __future__ import annotations

import enum

import msgspec


class SnapshotKind(enum.StrEnum):
    """Why a snapshot was taken."""

    AUTO = "auto"
    EXPLICIT = "explicit"
    SUSPEND = "suspend"
    FORK = "fork"
    BASE = "base"


class LayerRef(msgspec.Struct, frozen=True):
    """A sealed layer by its content address (blake3 over its canonical entries, hex)."""

    id: str
    bytes: int
    entries: int


class MemoryRef(msgspec.Struct, frozen=True):
    """A memory image by its content address, with what is needed to judge whether it can run here.

    `files` maps file name to (size, blake3 hex). `driver` and `runtime` name who wrote it,
    `cpu` the features the image may rely on.
    """

    id: str
    bytes: int
    files: dict[str, tuple[int, str]]
    driver: str
    runtime: str
    cpu: list[str]


class ImageConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a template's version comes from, and what its image says of itself beyond environment,
    user and directory. `source` is what was asked for, `digest` that of the image's manifest.
    `entrypoint` and `cmd` are offered, and run by themselves only where `start` is said; `step` is
    the key of a step of a Containerfile, by which it is found again; `left_out` counts devices and
    attributes of the image that no sandbox takes."""

    source: str
    digest: str | None = None
    entrypoint: list[str] = []
    cmd: list[str] = []
    labels: dict[str, str] = {}
    start: bool = False
    step: str | None = None
    left_out: int = 0


class SnapshotConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a sandbox needs besides files and memory to run on. An empty `cwd` is the home of
    whoever runs a command. The lowest `base_layers` layers are the template's; `image` is what a
    template that was built says.

    What has its default is not encoded: so fingerprints stay what they were."""

    template: str
    env: dict[str, str]
    user: str
    cwd: str
    hostname: str
    base_layers: int = 1
    image: ImageConfig | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot's manifest: ordered layers (lowest first, the template's among them),
    an optional memory image, configuration, parent and the fingerprint over all of it."""

    id: str
    session: str
    parent: str | None
    kind: SnapshotKind
    label: str | None
    created_at: float
    layers: list[LayerRef]
    memory: MemoryRef | None
    config: SnapshotConfig
    fingerprint: str
    format: int = 1
