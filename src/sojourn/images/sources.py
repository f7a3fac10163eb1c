"""Where an image to send comes from: an OCI layout directory, a file, a registry.

Guarantee: what is sent is one tar with the image that was meant and nothing else; every blob is
compared with its digest while it is sent, and where it is another one the sending ends visibly cut
off, so nobody can take it for the image.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sojourn.errors import ImageInvalid, InvalidRequest
from sojourn.images.archives import blob_name
from sojourn.images.documents import (
    MAX_DOCUMENT,
    OCI_MANIFEST,
    Blob,
    Descriptor,
    ImageDocument,
    Index,
    Platform,
    check_image,
    choose,
    decode,
    find_manifest,
    host_platform,
    read_document,
    verified,
)
from sojourn.images.references import parse_reference
from sojourn.wire.tar import END, Entry, encode_entry, padding

_PIECE = 1 << 20
_MACHINES = ("amd64", "arm64", "arm", "386", "ppc64le", "riscv64", "s390x")


class Sent(msgspec.Struct, frozen=True):
    """An image on its way: `pieces` of a tar, `tag` the image in it that is meant (None: the only
    one), `source` what to tell of where it came from, `size` of the tar and `digest` of the image's
    manifest where they are known."""

    pieces: Iterator[bytes]
    tag: str | None
    source: str
    size: int | None
    digest: str | None = None


def parse_platform(text: str | None) -> Platform:
    """`linux/arm64`, `linux/arm/v7`; without one this machine's. Raises InvalidRequest."""
    if text is None:
        return host_platform()
    parts = text.split("/")
    if len(parts) not in (2, 3) or parts[0] != "linux" or parts[1] not in _MACHINES:
        raise InvalidRequest(f"{text!r} is no platform such as linux/amd64", field="platform")
    return Platform(parts[1], parts[0], parts[2] if len(parts) == 3 else None)


def open_source(
    source: str, *, platform: str | None = None, insecure: bool = False
) -> contextlib.AbstractContextManager[Sent]:
    """An image to send: `oci:DIR[:TAG]`, `docker-archive:FILE[:TAG]` (or `oci-archive:`), or a
    reference such as `registry.example/name:tag`. `insecure` lets a registry be asked without TLS.

    Raises InvalidRequest, ImageInvalid, RegistryRefused, Unreachable."""
    kind, colon, rest = source.partition(":")
    if colon and kind == "oci":
        return _layout(*_with_tag(rest, Path.is_dir), parse_platform(platform))
    if colon and kind in ("docker-archive", "oci-archive"):
        return _file(kind, *_with_tag(rest, Path.is_file))
    return _pulled(source, parse_platform(platform), insecure)


def _with_tag(rest: str, there: object) -> tuple[Path, str | None]:
    """Path and tag of `PATH[:TAG]`: a path may hold colons, so what exists decides."""
    assert callable(there)
    path = Path(rest)
    if not rest or there(path) or ":" not in rest:
        return path, None
    before, _, tag = rest.rpartition(":")
    return (Path(before), tag) if there(Path(before)) else (path, None)


@contextlib.contextmanager
def _file(kind: str, path: Path, tag: str | None) -> Iterator[Sent]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="source") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        pieces = iter(lambda: file.read(_PIECE), b"")
        yield Sent(pieces, tag, f"{kind}:{path.name}{f':{tag}' if tag else ''}", size)


@contextlib.contextmanager
def _layout(path: Path, tag: str | None, platform: Platform) -> Iterator[Sent]:
    def blob(descriptor: Descriptor) -> Iterator[bytes]:
        return _read(path / blob_name(descriptor.digest))

    index = decode(b"".join(_read(path / "index.json", MAX_DOCUMENT)), Index, "index")
    top = choose(index, platform, tag, str(path))
    yield as_tar(blob, top, platform, f"oci:{path.name}{f':{tag}' if tag else ''}")


def _read(path: Path, limit: int | None = None) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            if limit is not None and os.fstat(file.fileno()).st_size > limit:
                raise ImageInvalid(f"{path} is over {limit} bytes")
            while piece := file.read(_PIECE):
                yield piece
    except OSError as error:
        raise ImageInvalid(
            f"{path} cannot be read: {error.strerror}",
            next_step="Give the directory of an OCI layout (the one with index.json in it).",
        ) from error


@contextlib.contextmanager
def _pulled(text: str, platform: Platform, insecure: bool) -> Iterator[Sent]:
    from sojourn.images.registry import Registry  # only where one is asked

    reference = parse_reference(text)
    with Registry(reference, insecure=insecure) as registry:
        top = registry.resolve()
        named = f"{reference.host}/{reference.repository}"
        tag = f":{reference.tag}" if reference.tag else ""
        yield as_tar(registry.blob, top, platform, f"{named}{tag}@{top.digest}")


def as_tar(blob: Blob, top: Descriptor, platform: Platform, source: str) -> Sent:
    """The image that a descriptor leads to, as an OCI layout in a tar. Its documents are read at
    once, its layers as they are sent."""
    descriptor, payload, manifest = find_manifest(blob, top, platform)
    config, document = read_document(blob, manifest.config, ImageDocument, "configuration")
    check_image(document, len(manifest.layers), platform)
    found = msgspec.structs.replace(descriptor, annotations=None, platform=None)
    if not found.media_type:
        found = msgspec.structs.replace(found, media_type=OCI_MANIFEST)
    index = msgspec.json.encode({"schemaVersion": 2, "manifests": [found]})
    small = [
        ("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'),
        ("index.json", index),
        (blob_name(found.digest), payload),
        (blob_name(manifest.config.digest), config),
    ]
    layers = list({layer.digest: layer for layer in manifest.layers}.values())
    sizes = [len(content) for _, content in small] + [layer.size for layer in layers]
    total = sum(512 + size + -size % 512 for size in sizes) + len(END)

    def pieces() -> Iterator[bytes]:
        for name, content in small:
            yield _header(name, len(content)) + content + padding(len(content))
        for layer in layers:
            yield _header(blob_name(layer.digest), layer.size)
            yield from verified(blob(layer), layer.digest, layer.size)
            yield padding(layer.size)
        yield END

    return Sent(pieces(), None, source, total, found.digest)


def _header(name: str, size: int) -> bytes:
    return encode_entry(Entry(name.encode(), "file", size=size))
