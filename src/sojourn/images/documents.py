"""The documents of an image: index, manifest, configuration; and which of several is meant.

Guarantee: a document is read only when it is the one of its digest, within the bounds of the
specification, and of the form that is used here; what else it says is not looked at. Of a list of
images that of this machine is taken, or none.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from sojourn.errors import ImageInvalid

T = TypeVar("T")

MAX_DOCUMENT = 4 * 1024 * 1024
MAX_LAYERS = 512
_MAX_NESTED = 4
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEXES = frozenset({OCI_INDEX, DOCKER_LIST})
MANIFESTS = frozenset({OCI_MANIFEST, DOCKER_MANIFEST})
TAG = "org.opencontainers.image.ref.name"
NAME = "io.containerd.image.name"

_MACHINES = {
    "x86_64": ("amd64", None),
    "aarch64": ("arm64", "v8"),
    "armv7l": ("arm", "v7"),
    "i686": ("386", None),
}


class Platform(msgspec.Struct, frozen=True):
    """What an image is for."""

    architecture: str = ""
    os: str = ""
    variant: str | None = None


class Descriptor(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A blob by its digest and size."""

    digest: str
    size: int
    media_type: str = ""
    platform: Platform | None = None
    annotations: dict[str, str] | None = None


class Index(msgspec.Struct, frozen=True, rename="camel"):
    """Images to choose from."""

    manifests: list[Descriptor]


class ManifestDocument(msgspec.Struct, frozen=True, rename="camel"):
    """One image: its configuration and its layers, lowest first."""

    config: Descriptor
    layers: list[Descriptor]


class RunConfig(msgspec.Struct, frozen=True, rename="pascal"):
    """What the image says of how it is run."""

    env: list[str] | None = None
    user: str | None = None
    working_dir: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    labels: dict[str, str] | None = None


class RootFs(msgspec.Struct, frozen=True):
    """The digests of the layers as they are unpacked."""

    diff_ids: list[str]


class ImageDocument(msgspec.Struct, frozen=True):
    """An image's configuration."""

    rootfs: RootFs
    architecture: str = ""
    os: str = ""
    variant: str | None = None
    config: RunConfig | None = None


def check_digest(digest: str) -> str:
    """Raises ImageInvalid for what is no digest that can be compared."""
    if not _DIGEST.fullmatch(digest):
        raise ImageInvalid(f"{digest[:100]!r} is no sha256 or sha512 digest")
    return digest


def check_descriptor(descriptor: Descriptor) -> Descriptor:
    """Raises ImageInvalid."""
    check_digest(descriptor.digest)
    if not 0 <= descriptor.size < 2**53:
        raise ImageInvalid(f"the image holds a blob of {descriptor.size} bytes")
    return descriptor


def decode(payload: bytes, kind: type[T], what: str) -> T:
    """A document's content. Raises ImageInvalid."""
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ImageInvalid(f"the image's {what} is malformed: {error}") from error


class Verifier:
    """Compares a blob with its digest and size as it passes."""

    def __init__(self, digest: str, size: int | None) -> None:
        self._digest = check_digest(digest)
        self._size = size
        self._hash: Any = hashlib.new(digest.partition(":")[0])
        self.seen = 0

    def update(self, piece: bytes) -> None:
        """Take a piece. Raises ImageInvalid as soon as there is too much."""
        self.seen += len(piece)
        if self._size is not None and self.seen > self._size:
            raise ImageInvalid(f"blob {self._digest} is longer than {self._size} bytes")
        self._hash.update(piece)

    def finish(self) -> None:
        """It is complete. Raises ImageInvalid where it is another one."""
        if self._size is not None and self.seen != self._size:
            raise ImageInvalid(f"blob {self._digest} ends after {self.seen} of {self._size} bytes")
        if self._hash.hexdigest() != self._digest.partition(":")[2]:
            raise ImageInvalid(f"blob {self._digest} is damaged: its digest is another")


def verified(pieces: Iterable[bytes], digest: str, size: int | None) -> Iterator[bytes]:
    """The pieces of a blob. Raises ImageInvalid at its end where it is another one."""
    verifier = Verifier(digest, size)
    for piece in pieces:
        verifier.update(piece)
        yield piece
    verifier.finish()


Blob = Callable[[Descriptor], Iterable[bytes]]
"""Gives a blob's pieces as they are stored, unproven."""


def read_document(blob: Blob, descriptor: Descriptor, kind: type[T], what: str) -> tuple[bytes, T]:
    """A document as bytes and as what it says. Raises ImageInvalid."""
    check_descriptor(descriptor)
    if descriptor.size > MAX_DOCUMENT:
        raise ImageInvalid(f"the image's {what} is over {MAX_DOCUMENT} bytes")
    payload = b"".join(verified(blob(descriptor), descriptor.digest, descriptor.size))
    return payload, decode(payload, kind, what)


def host_platform() -> Platform:
    """What images for this machine say."""
    machine = os.uname().machine
    architecture, variant = _MACHINES.get(machine, (machine, None))
    return Platform(architecture, "linux", variant)


def fits(platform: Platform, host: Platform) -> bool:
    """Whether an image of a platform runs on this machine."""
    if (platform.os, platform.architecture) != (host.os, host.architecture):
        return False
    return not platform.variant or not host.variant or platform.variant == host.variant


def choose(index: Index, host: Platform, tag: str | None, what: str) -> Descriptor:
    """The image of an index that is meant and runs here. Raises ImageInvalid."""
    found = index.manifests
    if len(found) > 1000:
        raise ImageInvalid(f"{what} lists over 1000 images")
    if tag is not None:
        named = [one for one in found if _has_tag(one, tag)]
        if not named:
            known = sorted({_tag(one) for one in found} - {""})
            raise ImageInvalid(
                f"{what} has no image tagged {tag!r}",
                next_step=f"Tags in it: {', '.join(known) or 'none'}.",
                tags=known,
            )
        found = named
    found = [one for one in found if one.media_type in INDEXES | MANIFESTS | {""}]
    fitting = [one for one in found if one.platform is None or fits(one.platform, host)]
    if not fitting:
        offered = sorted({f"{p.os}/{p.architecture}" for one in found if (p := one.platform)})
        raise ImageInvalid(
            f"{what} has no image for {host.os}/{host.architecture}"
            f" (it has {', '.join(offered) or 'none'})"
        )
    exact = [one for one in fitting if one.platform is not None]
    if tag is None and not exact and len({one.digest for one in fitting}) > 1:
        known = sorted({_tag(one) for one in fitting} - {""})
        raise ImageInvalid(
            f"{what} holds {len(fitting)} images",
            next_step=f"Say which: DIR:TAG. Tags in it: {', '.join(known) or 'none'}.",
            tags=known,
        )
    return check_descriptor((exact or fitting)[0])


def _tag(one: Descriptor) -> str:
    return (one.annotations or {}).get(TAG, "")


def _has_tag(one: Descriptor, tag: str) -> bool:
    name = (one.annotations or {}).get(NAME, "")
    return tag in (_tag(one), name) or name.endswith(f":{tag}")


def find_manifest(
    blob: Blob, top: Descriptor, host: Platform
) -> tuple[Descriptor, bytes, ManifestDocument]:
    """From a descriptor through indexes to the manifest for this machine. Raises ImageInvalid."""
    descriptor = top
    for _ in range(_MAX_NESTED):
        payload, found = read_document(blob, descriptor, dict[str, Any], "manifest")
        kind = descriptor.media_type or str(found.get("mediaType") or "")
        if kind in INDEXES or (kind not in MANIFESTS and "manifests" in found):
            index = decode(payload, Index, "index")
            descriptor = choose(index, host, None, "the image's index")
            continue
        if "layers" not in found or "config" not in found:
            raise ImageInvalid(
                f"the manifest is of a kind that is not read ({kind[:100] or 'unknown'})",
                next_step="Push the image anew with a current tool.",
            )
        manifest = decode(payload, ManifestDocument, "manifest")
        if len(manifest.layers) > MAX_LAYERS:
            raise ImageInvalid(f"the image has over {MAX_LAYERS} layers")
        for layer in (manifest.config, *manifest.layers):
            check_descriptor(layer)
        return descriptor, payload, manifest
    raise ImageInvalid("the image's indexes lead to one another")


def check_image(image: ImageDocument, layers: int, host: Platform) -> ImageDocument:
    """Raises ImageInvalid for a configuration that is not of so many layers, or of another
    machine."""
    if len(image.rootfs.diff_ids) != layers:
        raise ImageInvalid(
            f"the image has {layers} layers and tells of {len(image.rootfs.diff_ids)}"
        )
    for digest in image.rootfs.diff_ids:
        check_digest(digest)
    told = Platform(image.architecture, image.os or "linux", image.variant)
    if image.architecture and not fits(told, host):
        raise ImageInvalid(
            f"the image is for {told.os}/{told.architecture}; wanted is"
            f" {host.os}/{host.architecture}"
        )
    return image
