"""Whole layers into stores that fail for real: a bucket behind a bad line, a disk that is full."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from blake3 import blake3

from sojourn.errors import StorageFull, StoreUnreachable
from sojourn.repository.backends.local import LocalBackend
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.domains import Domain
from sojourn.repository.layers_out import publish_layer, push_layer
from sojourn.repository.uploads import Upload, adopt_unindexed
from sojourn.store.manifests import Manifest
from support.object_stores import FaultProxy, s3_options
from support.uploads import data_of, domain_on, manifest_at

R = random.Random(21)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """40 MiB in files of half a MiB."""
    top = tmp_path / "tree"
    top.mkdir()
    for number in range(80):
        (top / f"f{number}").write_bytes(R.randbytes(512 << 10))
    return top


def push(domain: Domain, manifest: Manifest, tree: Path) -> Upload:
    with Upload(domain) as up:
        push_layer(domain, up, manifest, tree)
        up.flush()
    publish_layer(domain, manifest)
    return up


def check(domain: Domain, manifest: Manifest, tree: Path) -> None:
    assert domain.has_layer(manifest.id)
    for path, digest in manifest.digests.items():
        data = data_of(domain, digest)
        assert blake3(data).digest() == digest
        assert data == (tree / os.fsdecode(path)).read_bytes()


def test_a_bad_line_to_a_bucket_is_borne(s3_server, tree):
    manifest = manifest_at(tree)
    with FaultProxy.before(s3_server.url) as proxy:
        url = f"s3://{s3_server.make_bucket()}/p"
        backend = open_backend(url, options=s3_options(proxy.url, timeout=20, patience=60))
        domain = domain_on(backend)
        proxy.answer(503, code="SlowDown", times=2, method="PUT", key="/packs/")
        proxy.drop(times=1, method="PUT", key="/packs/")
        proxy.drop(after=True, times=1, method="PUT", key="/indexes/")
        proxy.answer(500, code="InternalError", times=1, method="PUT", key="/layers/")
        up = push(domain, manifest, tree)
        assert up.sent_bytes > manifest.ref.bytes
        proxy.clear()
        check(domain_on(backend), manifest, tree)


def test_a_bucket_that_goes_away_is_an_error_and_the_next_push_sends_the_rest(s3_server, tree):
    manifest = manifest_at(tree)
    with FaultProxy.before(s3_server.url) as proxy:
        url = f"s3://{s3_server.make_bucket()}/p"
        backend = open_backend(url, options=s3_options(proxy.url, timeout=20, patience=1))
        domain = domain_on(backend)
        proxy.answer(503, code="SlowDown", times=None, method="PUT", key="/packs/", skip=3)
        with pytest.raises(StoreUnreachable):
            push(domain, manifest, tree)
        proxy.clear()
        again = domain_on(backend)
        assert not again.has_layer(manifest.id)
        assert adopt_unindexed(again) == 3  # of four, two of data at least
        up = push(again, manifest, tree)
        assert up.relied
        assert up.sent_bytes < manifest.ref.bytes - (8 << 20)
        check(domain_on(backend), manifest, tree)


@pytest.mark.privileged
def test_a_full_disk_is_told_and_what_was_there_stays(tree, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    (small / "file").write_bytes(b"an older layer's")
    older, manifest = manifest_at(small), manifest_at(tree)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=28m", "none", str(disk)], check=True)
    try:
        backend = LocalBackend(disk / "store")
        domain = domain_on(backend)
        push(domain, older, small)
        with pytest.raises(StorageFull):
            push(domain, manifest, tree)
        fresh = domain_on(backend)
        assert not fresh.has_layer(manifest.id)
        check(fresh, older, small)
        subprocess.run(["mount", "-o", "remount,size=80m", str(disk)], check=True)
        push(fresh, manifest, tree)
        check(domain_on(backend), manifest, tree)
        check(domain_on(backend), older, small)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
