"""Domains over backends in memory, backends that fail as told, and reading back what was sent."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from sojourn.repository import config
from sojourn.repository.backends.base import Backend
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.domains import Domain
from sojourn.repository.images import ImageMap
from sojourn.repository.packs import CHUNK_DATA, open_block
from sojourn.store.fingerprints import hash_entry
from sojourn.store.manifests import Manifest, manifest_of
from sojourn.store.trees import Directories, read_extra, scan_tree

SECRET = b"a secret of the operator's"


class Told:
    """A backend that counts its puts and lets the test answer them: `before(key, number)` is
    called first, numbers from 1, and may raise or wait."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend = backend or open_backend("memory:")
        self.before: Callable[[str, int], None] = lambda key, number: None
        self.puts: list[str] = []
        self.gets: list[str] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str):
        return getattr(self.backend, name)

    def put(self, key: str, data: bytes, **conditions) -> str:
        with self._lock:
            self.puts.append(key)
            number = len(self.puts)
        self.before(key, number)
        return self.backend.put(key, data, **conditions)

    def get_ranges(self, key, ranges):
        self.gets.append(key)
        return self.backend.get_ranges(key, ranges)

    def packs(self) -> list[str]:
        """Keys of the packs that were put."""
        return [key for key in self.puts if "/packs/" in key]


def domain_on(backend: Backend, secret: bytes | None = None, name: str = "ten_1") -> Domain:
    """A domain of the repository on this backend, which is made where there is none, as a process
    that has just started sees it."""
    _, keyring = config.create(backend, secret)
    return Domain(backend, keyring.domain(name))


def fetch(domain: Domain, kind: int, content: bytes) -> bytes:
    """A chunk from the store, by its content id."""
    place = domain.index.find(domain.keys.chunk_name(kind, content))
    assert place is not None, "no index names the chunk"
    block = place.pack.block(place.block)
    key = domain.pack_key(place.pack.id)
    stored = domain.backend.get_ranges(key, [(block.offset, block.stored)])[0]
    raw = open_block(stored, place.pack, place.block, domain.keys)
    return raw[place.offset : place.offset + place.length]


def data_of(domain: Domain, content: bytes) -> bytes:
    """A data chunk from the store, proven by its content id."""
    data = fetch(domain, CHUNK_DATA, content)
    assert blake3(data).digest() == content
    return data


def files_of(domain: Domain, image: ImageMap) -> dict[str, bytes]:
    """The files of an image, put together from the store alone."""
    made = {}
    for name in image.files:
        made[name] = b"".join(
            bytes(length)
            if source == 0
            else data_of(domain, image.chunk(source))[offset : offset + length]
            for length, source, offset in image.pieces(name)
        )
    return made


def manifest_at(tree: Path) -> Manifest:
    """The manifest of a tree as it lies there."""
    scan = scan_tree(tree, 0)
    digests = {}
    with Directories(tree) as held:
        for path, facts in scan.entries.items():
            fd, name = held.parent(path) if path else (held.get(b""), b"")
            scan.extras[path] = read_extra(fd, name, facts[0])
            if stat.S_ISREG(facts[0]):
                digests[path] = hash_entry(fd, name)
    return manifest_of(scan, digests)
