"""What snapshots need is found completely, once each, or not at all."""

from __future__ import annotations

import os

import pytest

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.repository.damages import Damage, write_damage
from sojourn.repository.marking import Marks, mark, read_snapshots
from sojourn.repository.records import DATA
from support.dictionaries import DictBackend
from support.repositories import TENANT, Node


@pytest.fixture
def here(tmp_path):
    return Node(DictBackend(), tmp_path)


def marks(here, *names: str) -> dict[str, Marks]:
    fresh = here.fresh()
    return mark({name: fresh.domain(name) for name in {TENANT, "shared", *names}})


def stored(here, name: str) -> set[bytes]:
    return {chunk for pack in here.fresh().domain(name).index.packs() for chunk in pack.names()}


def test_it_is_every_chunk_that_was_sent_and_no_other(here):
    here.publish({"a": b"a", "dir/b": os.urandom(3 << 20), "empty": b""})
    here.publish({"a": b"a"}, {"c": b"c" * 100}, memory={"pages.img": os.urandom(400_000)})
    found = marks(here)
    assert found[TENANT].chunks == stored(here, TENANT)
    assert found["shared"].chunks == stored(here, "shared")
    assert len(found[TENANT].layers) == 3
    assert len(found[TENANT].images) == 1
    assert len(found["shared"].layers) == 1
    assert {key.split("/")[2] for key in here.keys(f"{TENANT}/layers/")} <= (
        found[TENANT].root_names()
    )


def test_what_was_deleted_is_not_needed(here):
    kept = here.publish({"a": b"a"})
    only = stored(here, TENANT)
    here.delete(here.publish({"b": os.urandom(2 << 20)}, memory={"m": b"m" * 100_000}))
    found = marks(here)
    assert found[TENANT].chunks == only
    assert set(found[TENANT].layers) == {kept.layers[1].id}
    assert not found[TENANT].images


def test_shared_layers_are_those_of_all_tenants(here):
    one = here.publish({"a": b"a"}, base={"t": b"1"})
    two = here.publish({"a": b"a"}, base={"t": b"2"}, tenant="ten_2")
    found = marks(here, "ten_2")
    assert set(found["shared"].layers) == {one.layers[0].id, two.layers[0].id}


def test_what_many_snapshots_share_is_read_once(here):
    files = {f"d{n % 7}/f{n}": str(n).encode() for n in range(120)}
    for number in range(8):
        here.publish({**files, "own": str(number).encode()})
    read: list[tuple[str, int]] = []
    ranges = here.backend.get_ranges

    def counting(key, wanted):
        read.extend((key, offset) for offset, _ in wanted)
        return ranges(key, wanted)

    here.backend.get_ranges = counting
    marks(here)
    # Layers are walked a few at once, so the first ones may meet the same segments.
    assert len(read) <= 4 * len(set(read))
    assert len(set(read)) < 60


@pytest.mark.parametrize("part", ["/snapshots/", "/layers/", "/images/"])
def test_what_cannot_be_read_is_named(here, part):
    here.publish({"a": b"a"}, memory={"m": b"m" * 100_000})
    for key in here.keys(f"{TENANT}{part}"):
        data = here.backend.get(key)[0]
        here.backend.put(key, data[:-1])
        with pytest.raises(IntegrityError) as raised:
            marks(here)
        assert raised.value.details["object"]
        here.backend.put(key, data)
    marks(here)


def test_a_segment_or_recipe_that_is_missing_is_named_with_its_layer_and_snapshot(here):
    made = here.publish({"big": os.urandom(3 << 20)})
    for pack in here.domain().index.packs():
        if pack.kind == DATA:
            continue
        key = here.domain().pack_key(pack.id)
        data = here.backend.get(key)[0]
        here.backend.delete([key])
        with pytest.raises(IntegrityError, match=made.layers[1].id) as raised:
            marks(here)
        assert raised.value.details["snapshot"] == made.id
        here.backend.put(key, data)


def test_a_snapshot_that_is_deleted_meanwhile_does_not_count(here):
    kept = here.publish({"a": b"a"})
    gone = here.publish({"b": b"b"})
    get = here.backend.get

    def deleting(key, **limits):
        if "/layers/" in key:  # the snapshots are read, the layers not yet
            here.backend.delete([here.domain().snapshot_key(gone.id)])
            here.backend.delete([here.domain().layer_key(gone.layers[1].id)])
        return get(key, **limits)

    here.backend.get = deleting
    found = marks(here)
    name = here.domain().keys.chunk_name(0, bytes(32))
    assert name not in found[TENANT].chunks
    assert kept.layers[1].id in found[TENANT].layers


def test_a_layer_that_a_living_snapshot_needs_and_that_is_missing_stops_it(here):
    made = here.publish({"a": b"a"})
    here.backend.delete([here.domain().layer_key(made.layers[1].id)])
    with pytest.raises(IntegrityError, match="cannot be read"):
        marks(here)


def test_what_is_written_down_as_lost_is_passed_over_and_the_rest_of_it_kept(here):
    made = here.publish({"big": os.urandom(3 << 20), "bigger": os.urandom(4 << 20), "small": b"s"})
    all_chunks = stored(here, TENANT)
    domain = here.domain()
    lost = next(pack for pack in domain.index.packs() if pack.kind == DATA)
    here.backend.delete([domain.pack_key(lost.id)])
    here.backend.delete(here.keys(f"{TENANT}/indexes/"))
    domain.write_index([pack for pack in domain.index.packs() if pack.id != lost.id])
    gone = set(lost.names())
    write_damage(domain, Damage(made.id, "ses_1", 0.0, ["files"], b"".join(gone)))
    found = marks(here)[TENANT]
    assert found.chunks == all_chunks
    assert found.lost >= gone


def test_snapshots_that_cannot_be_read_are_given_by_id(here):
    kept, bad = here.publish({"a": b"a"}), here.publish({"b": b"b"})
    here.backend.put(here.domain().snapshot_key(bad.id), b"nonsense")
    faults: dict[str, IntegrityError] = {}
    assert [snapshot.id for snapshot in read_snapshots(here.domain(), faults)] == [kept.id]
    assert set(faults) == {bad.id}
    with pytest.raises(IntegrityError):
        list(read_snapshots(here.domain()))


def test_a_copy_stands_in_for_the_key(here):
    made = here.publish({"a": b"a"})
    domain = here.domain()
    key = domain.layer_key(made.layers[1].id)
    payload = domain.get_object(b"LAYR", key)
    domain.avoid([key])
    copy = domain.put_root(b"LAYR", key, payload)
    assert copy != key
    here.backend.delete([key])
    fresh = here.fresh().domain()
    assert fresh.get_root(b"LAYR", key) == payload
    assert domain.has_layer(made.layers[1].id)
    here.restore(made)
    marks(here)
    here.backend.delete([copy])
    assert not domain.has_layer(made.layers[1].id)
    with pytest.raises(ObjectMissing):
        fresh.get_root(b"LAYR", key)
