"""Images made in the test, with the standard library: layers, layouts, saved archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import zstandard

from sojourn.node import tools

Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, content: bytes = b"", **facts: Any) -> Member:
    """A member of a layer; `facts` are attributes of its TarInfo, `pax` its extended headers."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = 0o644
    info.mtime = 1_600_000_000
    info.pax_headers = facts.pop("pax", {})
    for key, value in facts.items():
        setattr(info, key, value)
    if info.type == tarfile.DIRTYPE and "mode" not in facts:
        info.mode = 0o755
    return info, content


def directory(name: str, **facts: Any) -> Member:
    return member(name, type=tarfile.DIRTYPE, **facts)


def symlink(name: str, target: str) -> Member:
    return member(name, type=tarfile.SYMTYPE, linkname=target, mode=0o777)


def hardlink(name: str, target: str) -> Member:
    return member(name, type=tarfile.LNKTYPE, linkname=target)


def layer(members: Iterable[Member]) -> bytes:
    """A layer's tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content) if info.size else None)
    return buffer.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


PACKING = {
    "": lambda data: data,
    "+gzip": lambda data: gzip.compress(data, 1, mtime=0),
    "+zstd": lambda data: zstandard.ZstdCompressor().compress(data),
}


class MadeImage:
    """An image as blobs: what layouts, registries and archives hold."""

    def __init__(
        self,
        layers: list[bytes],
        *,
        packing: str = "+gzip",
        config: Mapping[str, Any] | None = None,
        architecture: str | None = None,
    ) -> None:
        machine = {"x86_64": "amd64", "aarch64": "arm64"}
        self.architecture = architecture or machine[os.uname().machine]
        self.layers = layers
        self.blobs: dict[str, bytes] = {}
        self.config_bytes = json.dumps(
            {
                "architecture": self.architecture,
                "os": "linux",
                "config": dict(config or {}),
                "rootfs": {"type": "layers", "diff_ids": [digest(one) for one in layers]},
            }
        ).encode()
        media = "application/vnd.oci.image."
        self.manifest = {
            "schemaVersion": 2,
            "mediaType": f"{media}manifest.v1+json",
            "config": self.put(self.config_bytes, f"{media}config.v1+json"),
            "layers": [
                self.put(PACKING[packing](one), f"{media}layer.v1.tar{packing}") for one in layers
            ],
        }
        self.top = self.put(json.dumps(self.manifest).encode(), f"{media}manifest.v1+json")

    def put(self, data: bytes, media: str) -> dict[str, Any]:
        self.blobs[digest(data)] = data
        return {"mediaType": media, "digest": digest(data), "size": len(data)}

    @property
    def platform(self) -> dict[str, str]:
        return {"os": "linux", "architecture": self.architecture}

    def layout(self, place: Path, tag: str = "latest") -> Path:
        """An OCI layout directory."""
        blobs = place / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for name, data in self.blobs.items():
            (blobs / name.partition(":")[2]).write_bytes(data)
        (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        top = {**self.top, "annotations": {"org.opencontainers.image.ref.name": tag}}
        (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [top]}))
        return place

    def archive(self) -> bytes:
        """The layout as a tar."""
        index = json.dumps({"schemaVersion": 2, "manifests": [self.top]}).encode()
        members = [member("oci-layout", b"{}"), member("index.json", index)]
        for name, data in self.blobs.items():
            members.append(member(f"blobs/{name.replace(':', '/')}", data))
        return layer(members)

    def saved(self, place: Path, *tags: str) -> Path:
        """What older versions of `docker save` write."""
        members: list[Member] = []
        names = []
        for number, one in enumerate(self.layers):
            names.append(f"{number:064d}/layer.tar")
            members.append(member(names[-1], one))
        config = f"{digest(self.config_bytes).partition(':')[2]}.json"
        members.append(member(config, self.config_bytes))
        described = [{"Config": config, "RepoTags": list(tags), "Layers": names}]
        members.append(member("manifest.json", json.dumps(described).encode()))
        place.write_bytes(layer(members))
        return place


PROGRAMS = (
    "sh",
    "cat",
    "ls",
    "stat",
    "sleep",
    "id",
    "env",
    "cp",
    "mv",
    "rm",
    "mkdir",
    "readlink",
    "true",
)


def _needed(program: Path) -> set[str]:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return {word for word in listed.split() if word.startswith("/")}


def small_root() -> list[Member]:
    """A root tree that runs a shell and a few commands: those of the node's own template."""
    root = tools.template_root("debian")
    paths = {f"/bin/{name}" for name in PROGRAMS}
    for name in PROGRAMS:
        place = (root / "bin" / name).resolve()
        if not str(place).startswith(str(root)):
            place = root / "usr" / "bin" / (root / "bin" / name).readlink().name
        paths |= _needed(place)
    made: dict[str, Member] = {}
    for name in ("bin", "lib", "lib64", "etc", "root", "tmp", "dev", "proc", "sys", "run"):
        made[name] = directory(name)
    made["tmp"][0].mode = 0o1777
    made["etc/passwd"] = member(
        "etc/passwd", b"root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n"
    )
    made["etc/group"] = member("etc/group", b"root:x:0:\nagent:x:1000:\n")
    for path in sorted(paths):
        place = Path(os.path.realpath(root / path.lstrip("/")))
        if not place.is_relative_to(root.resolve()):
            place = root / "usr" / path.lstrip("/")
        name = path.lstrip("/")
        if name.startswith("usr/"):
            made.setdefault("usr", directory("usr"))
        parts = name.split("/")[:-1]
        for at in range(1, len(parts) + 1):
            made.setdefault("/".join(parts[:at]), directory("/".join(parts[:at])))
        made[name] = member(name, place.read_bytes(), mode=0o755)
    return list(made.values())
