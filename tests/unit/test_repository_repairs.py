"""What a repair brings back, from where, and what it does about what nobody has."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from sojourn.errors import IntegrityError
from sojourn.model.snapshots import Snapshot, SnapshotConfig, SnapshotKind
from sojourn.repository.checks import ERROR, check
from sojourn.repository.damages import read_damages
from sojourn.repository.packs import CHUNK_DATA, DATA, META
from sojourn.repository.repairs import NodeStore, Repaired, repair
from sojourn.repository.tombstones import Tombstones
from sojourn.repository.uploads import Upload
from sojourn.store.fingerprints import fingerprint
from sojourn.store.local import LocalStore
from support.dictionaries import DictBackend
from support.repositories import TENANT, Node

SECRET = b"a secret of the operator's"


class Trees:
    """A source: the trees a node has made."""

    def __init__(self, node: Node, snapshots: list[Snapshot] | None = None) -> None:
        self.node = node
        self.snapshots = {snapshot.id: snapshot for snapshot in snapshots or []}

    def manifest(self, layer: str):
        return self.node.trees[layer][0]

    def layer_path(self, layer: str) -> Path:
        return self.node.trees[layer][1]

    def image_path(self, image: str) -> Path:
        return self.node.images[image][1]

    def snapshot(self, snapshot: str) -> Snapshot:
        if snapshot not in self.snapshots:
            raise IntegrityError("not here", object=snapshot)
        return self.snapshots[snapshot]


@pytest.fixture(params=[None, SECRET], ids=["plain", "encrypted"])
def here(request, tmp_path):
    return Node(DictBackend(), tmp_path, request.param)


def errors(here) -> list[str]:
    found = check(here.backend, here.fresh().domain, read_data=True)
    return [problem.cause for problem in found if problem.severity == ERROR]


def mend(here, *sources) -> Repaired:
    return repair(here.backend, here.fresh().domain, sources)


def filled(here) -> list[Snapshot]:
    return [
        here.publish({f"f{n}": os.urandom(1000) for n in range(50)}, memory={"m": b"m" * 99999}),
        here.publish({"big": os.urandom(5 << 20), "small": b"s"}),
    ]


def packs(here, kind: int, domain: str = TENANT) -> list[str]:
    place = here.fresh().domain(domain)
    return sorted(place.pack_key(pack.id) for pack in place.index.packs() if pack.kind == kind)


def flip(here, key: str, at: int) -> None:
    data = bytearray(here.backend.get(key)[0])
    data[at] ^= 1
    here.backend.put(key, bytes(data))


def test_a_whole_repository_is_left_as_it_is(here):
    filled(here)
    before = here.keys("")
    report = mend(here)
    assert (report.packs, report.indexes, report.saved, report.damaged) == ([], 0, 0, [])
    assert here.keys("") == before


def test_what_is_good_in_a_damaged_pack_is_saved(here):
    kept = filled(here)
    for key in here.keys("/packs/"):
        flip(here, key, -1)  # the end mark: every block is good
    report = mend(here)
    assert len(report.packs) > 3
    assert report.saved > 50
    assert report.damaged == []
    assert errors(here) == []
    for snapshot in kept:
        here.fresh().restore(snapshot)
    here.fresh().collect()
    assert not set(report.packs) & set(here.keys("/packs/"))
    assert errors(here) == []


def test_what_is_lost_comes_from_a_node_that_has_it(here):
    kept = filled(here)
    for key in [*packs(here, DATA), *packs(here, META)]:
        here.backend.delete([key])
    assert errors(here)
    report = mend(here, Trees(here))
    assert report.layers == 2
    assert report.images == 1
    assert report.damaged == []
    assert errors(here) == []
    for snapshot in kept:
        here.fresh().restore(snapshot)


def test_what_nobody_has_is_marked_told_and_taken_away_when_it_is_back(here):
    first, second = filled(here)
    lost = packs(here, DATA)
    kept = {key: here.backend.get(key)[0] for key in lost}
    large = max(kept, key=lambda key: len(kept[key]))
    here.backend.delete([large])
    report = mend(here)
    assert [damage.snapshot for damage in report.damaged] == [second.id]
    assert any("/big" in name for name in report.damaged[0].objects)
    assert set(read_damages(here.domain())) == {second.id}
    problems = [p for p in check(here.backend, here.fresh().domain) if p.severity == ERROR]
    assert any(
        "could not make it whole" in p.cause and p.snapshots == [second.id] for p in problems
    )
    assert {id for p in problems for id in p.snapshots} == {second.id}
    # A collection goes on, and keeps what is left of it.
    small = here.keys("/packs/")
    here.fresh().collect()
    here.fresh().restore(first)
    assert len(here.keys("/packs/")) <= len(small)
    # Again without help: the same. With help it is whole.
    assert [damage.snapshot for damage in mend(here).damaged] == [second.id]
    report = mend(here, Trees(here))
    assert report.healed == [second.id]
    assert read_damages(here.domain()) == {}
    assert errors(here) == []
    here.fresh().restore(second)


def test_a_mark_goes_with_its_snapshot(here):
    _, second = filled(here)
    here.backend.delete(packs(here, DATA))
    assert mend(here).damaged
    here.delete(second)
    here.fresh().collect()
    assert second.id not in read_damages(here.domain())


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_indexes_are_made_anew_from_footers(here, how):
    kept = filled(here)
    for key in here.keys("/indexes/"):
        if how == "deleted":
            here.backend.delete([key])
        else:
            flip(here, key, 70)
    assert errors(here)
    report = mend(here)
    assert report.damaged == []
    assert errors(here) == []
    for snapshot in kept:
        here.fresh().restore(snapshot)


def test_an_index_that_is_wrong_about_a_pack_is_set_right(here):
    filled(here)
    domain = here.domain()
    pack = next(pack for pack in domain.index.packs() if len(pack) > 1)
    chunks = bytearray(pack.chunks)
    chunks[0] ^= 1
    here.backend.delete(here.keys(f"{TENANT}/indexes/"))
    others = [each for each in domain.index.packs() if each.id != pack.id]
    domain.write_index([*others, msgspec.structs.replace(pack, chunks=bytes(chunks))])
    assert errors(here)
    report = mend(here)
    assert report.indexes == 1
    assert report.packs == []
    assert errors(here) == []


@pytest.mark.parametrize("part", ["/layers/", "/images/"])
def test_records_of_layers_and_images_are_sent_again(here, part):
    filled(here)
    for number, key in enumerate(here.keys(part)):
        if number % 2:
            here.backend.delete([key])
        else:
            flip(here, key, 70)
    assert mend(here).damaged
    report = mend(here, Trees(here))
    assert report.layers + report.images == len(here.keys(part))
    assert report.damaged == []
    assert errors(here) == []


def test_a_snapshot_that_cannot_be_read_comes_from_a_source_or_is_marked(here):
    first, second = filled(here)
    for snapshot in (first, second):
        flip(here, here.domain().snapshot_key(snapshot.id), 70)
    report = mend(here, Trees(here, [first]))
    assert report.snapshots == 1
    assert [damage.snapshot for damage in report.damaged] == [second.id]
    here.fresh().restore(first)
    assert "manifest" in read_damages(here.domain())[second.id].objects[0]
    here.fresh().collect()  # what is marked as lost holds nothing up
    here.fresh().restore(first)


def test_a_source_whose_files_differ_is_of_no_use_and_the_next_is_asked(here, tmp_path):
    _, second = filled(here)
    here.backend.delete(packs(here, DATA))
    other = here.fresh()
    other.trees = {}
    for layer, (manifest, path) in here.trees.items():
        copy = tmp_path / "copies" / layer
        copy.mkdir(parents=True)
        for file in path.rglob("*"):
            if file.is_file():
                (copy / file.relative_to(path)).parent.mkdir(parents=True, exist_ok=True)
                (copy / file.relative_to(path)).write_bytes(b"?" * file.stat().st_size)
        other.trees[layer] = manifest, copy
    assert second.id in {damage.snapshot for damage in mend(here, Trees(other)).damaged}
    assert mend(here, Trees(other), Trees(here)).damaged == []
    assert errors(here) == []


def test_what_is_lost_may_lie_in_a_pack_that_is_on_its_way_out(here):
    # Two uploads at once brought the same content; one of the packs is named as dead.
    data = os.urandom(100_000)
    other = here.fresh().domain()
    assert len(other.index) == 0
    kept = here.publish({"f": data})
    [first] = packs(here, DATA)
    with Upload(other) as up:
        assert up.add(CHUNK_DATA, blake3(data).digest(), data)
    [second] = set(packs(here, DATA)) - {first}
    here.backend.ahead = 7200
    here.fresh().collect(grace=3600)
    [found] = Tombstones(here.fresh().domain()).look()
    dead = {here.domain().pack_key(id) for id in found.tombstone.pack_ids()}
    [needed] = {first, second} - dead
    flip(here, needed, 100)
    report = mend(here)
    assert report.saved == 1
    assert report.damaged == []
    here.backend.ahead *= 3
    here.fresh().collect(grace=3600)
    assert not {first, second} & set(here.keys("/packs/"))
    assert errors(here) == []
    here.fresh().restore(kept)


def test_a_tombstone_that_cannot_be_read_holds_nothing_up_after_a_repair(here):
    data = os.urandom(50_000)
    other = here.fresh().domain()
    assert len(other.index) == 0
    kept = here.publish({"f": data})
    with Upload(other) as up:  # the same content a second time
        assert up.add(CHUNK_DATA, blake3(data).digest(), data)
    here.delete(here.publish({"gone": os.urandom(60_000)}))
    here.backend.ahead = 7200
    here.fresh().collect(grace=3600)
    [key] = here.keys(f"{TENANT}/tombstones/")
    flip(here, key, 70)
    with pytest.raises(IntegrityError, match="tombstones"):
        here.fresh().collect()
    assert errors(here)
    mend(here)
    assert errors(here) == []
    # Whatever the old one said, neither copy is relied upon any more.
    assert here.fresh().collect(grace=3600).bytes > 110_000
    assert errors(here) == []
    here.fresh().restore(kept)


def test_a_mark_that_cannot_be_read_is_written_again(here):
    _, second = filled(here)
    here.backend.delete(packs(here, DATA))
    mend(here)
    flip(here, here.domain().key("damaged", second.id), 70)
    assert second.id in {damage.snapshot for damage in mend(here).damaged}
    assert second.id in read_damages(here.domain())


@pytest.mark.skipif(os.geteuid() != 0, reason="owners need root")
def test_the_store_of_a_node_is_a_source(tmp_path):
    store = LocalStore(tmp_path / "store")
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "file").write_bytes(os.urandom(5000))
    layer = store.seal_layer(upper, since=None, suspects=set()).take()
    source = NodeStore(store.root)
    assert source.manifest(layer.id).id == layer.id
    assert (source.layer_path(layer.id) / "file").stat().st_size == 5000
    config = SnapshotConfig(template="t", env={}, user="root", cwd="/", hostname="h")
    made = Snapshot(
        id="snp_1",
        session="ses_1",
        parent=None,
        kind=SnapshotKind.AUTO,
        label=None,
        created_at=0.0,
        layers=[layer],
        memory=None,
        config=config,
        fingerprint=fingerprint([layer], None, config),
    )
    store.publish_snapshot(made)
    assert source.snapshot("snp_1") == made
    for ask in (source.manifest, source.layer_path, source.image_path, source.snapshot):
        with pytest.raises(IntegrityError):
            ask("0" * 64)
