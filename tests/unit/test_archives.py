"""Archives of snapshots: what is written comes out, and nothing else is taken."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from sojourn.model.snapshots import Snapshot
from support.archives import data_of, opened
from support.repositories import Node, node

SECRET = b"a secret of sixteen bytes"


@pytest.fixture
def made(tmp_path: Path) -> tuple[Node, list[Snapshot]]:
    """Three snapshots, the last two from the first, with large files, holes and memory."""
    here = node(tmp_path / "node")
    large = os.urandom(3 << 20) + bytes(9 << 20) + os.urandom(1 << 20)
    pages = os.urandom(1 << 20) + bytes(1 << 20)
    first = here.snapshot({"a": b"one", "empty": b""}, memory={"pages.img": pages, "c.img": b"c"})
    layers = ({"a": b"one", "empty": b""}, {"large": large, "a": b"two"})
    more = pages[: 1 << 19] + os.urandom(1 << 16) + pages[1 << 19 :]
    second = here.snapshot(*layers, memory={"pages.img": more, "c.img": b"d"})
    third = here.snapshot({"a": b"one", "empty": b""}, {"b": b"three"})
    second = msgspec.structs.replace(second, parent=first.id, label="second")
    third = msgspec.structs.replace(third, parent=first.id)
    return here, [first, second, third]


def restore(data: bytes, into: Path, secret: bytes | None = None) -> dict[str, bytes]:
    """Everything in an archive, by layer or image and path."""
    archive = opened(data, secret)
    found = {}
    into.mkdir()
    for layer in archive.layers:
        archive.fetch_layer(layer, into / layer)
    for image in archive.images:
        (into / image).mkdir()
        archive.fetch_image(image, into / image, [])
    for path in into.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(into))] = path.read_bytes()
    return found


@pytest.mark.parametrize("secret", [None, SECRET])
def test_all_of_it_comes_out(
    made: tuple[Node, list[Snapshot]], secret: bytes | None, tmp_path: Path
) -> None:
    here, snapshots = made
    data = data_of(here, snapshots, secret)
    archive = opened(data, secret)
    assert sorted(one.id for one in archive.snapshots) == sorted(one.id for one in snapshots)
    assert archive.snapshots[0] == snapshots[0]
    assert {one.id: one for one in archive.snapshots} == {one.id: one for one in snapshots}
    assert archive.record.session.name == "box" and archive.record.session.tenant == "session"
    assert archive.record.snapshots[1].label == "second"
    found = restore(data, tmp_path / "out", secret)
    wanted = {
        f"{id}/{path.relative_to(tree)}": path.read_bytes()
        for id, (_, tree) in [*here.trees.items(), *here.images.items()]
        for path in tree.rglob("*")
        if path.is_file()
    }
    assert found == wanted
    # What the parent has is not there twice, and holes are not there at all.
    assert len(data) < (3 + 1 + 1) * (1 << 20) + (1 << 19)
    assert archive.needed >= 5 << 20
    if secret is not None:
        assert b"box" not in data


def test_one_snapshot_alone(made: tuple[Node, list[Snapshot]], tmp_path: Path) -> None:
    here, snapshots = made
    alone = msgspec.structs.replace(snapshots[1], parent=None)
    archive = opened(data_of(here, [alone]))
    assert archive.snapshots == [alone]
    assert set(archive.layers) == {layer.id for layer in alone.layers}
