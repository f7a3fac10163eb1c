"""What a collection frees, keeps, waits with, rewrites, and what stops it."""

from __future__ import annotations

import os

import pytest

from sojourn.errors import IntegrityError
from sojourn.repository.tombstones import DONE, NAMED, Tombstones
from support.repositories import DAY, TENANT, node

HOUR = 3600.0


def noise(size: int) -> bytes:
    return os.urandom(size)


def states(here) -> list[str]:
    return [found.tombstone.state for found in Tombstones(here.domain()).look()]


@pytest.fixture
def here(tmp_path):
    return node(tmp_path)


def test_what_only_a_deleted_snapshot_needed_is_freed_and_the_rest_stays(here):
    kept = here.publish({"a": b"kept", "both": b"x" * 1000})
    gone = here.publish({"b": noise(3 << 20), "both": b"x" * 1000}, memory={"m": noise(200_000)})
    here.restore(kept)
    before = here.keys("/packs/")
    here.delete(gone)
    report = here.collect()
    assert report.bytes > 3 << 20
    assert report.packs >= 1
    assert report.roots == 2  # a layer and an image
    assert len(here.keys("/packs/")) < len(before)
    assert here.keys("/images/") == []
    here.restore(kept)
    assert here.collect().bytes == 0


def test_with_all_snapshots_gone_only_the_configuration_and_tombstones_stay(here):
    for _ in range(3):
        here.delete(here.publish({"a": noise(1000)}, memory={"m": noise(100_000)}))
    here.collect()
    left = [key for key in here.keys("") if "/tombstones/" not in key]
    assert left == ["config"]
    here.backend.ahead += 8 * DAY
    here.collect()
    assert here.keys("") == ["config"]


def test_within_the_grace_nothing_goes_and_after_it_all(here):
    kept = here.publish({"a": b"kept"})
    gone = here.publish({"b": noise(100_000)})
    here.delete(gone)
    report = here.collect(grace=HOUR)
    assert (report.bytes, report.waiting_bytes) == (0, 0)  # too young to be named
    assert report.young_bytes > 100_000 and report.young_packs > 0
    here.backend.ahead = 2 * HOUR
    report = here.collect(grace=HOUR)
    assert report.bytes == 0
    assert report.waiting_bytes > 100_000 and report.waiting_packs > 0
    assert report.young_bytes == 0
    assert states(here) == [NAMED]
    here.backend.ahead = 2.5 * HOUR
    assert here.collect(grace=HOUR).bytes == 0
    here.backend.ahead = 3.5 * HOUR
    report = here.collect(grace=HOUR)
    assert report.bytes > 100_000
    assert (report.waiting_bytes, report.waiting_packs, report.young_bytes) == (0, 0, 0)
    assert states(here) == [DONE]
    here.restore(kept)


def test_what_is_needed_again_before_the_second_reading_is_taken_out(here):
    files = {"b": noise(100_000)}
    gone = here.publish(files)
    here.delete(gone)
    here.backend.ahead = 2 * HOUR
    assert here.collect(grace=HOUR).waiting_bytes > 0
    other = node(here.directory, here.backend)  # has not looked at the tombstones
    other.push(gone)
    here.backend.ahead = 4 * HOUR
    report = here.collect(grace=HOUR)
    assert report.bytes == 0
    other.restore(gone)
    assert states(here) == []


def test_what_is_named_is_not_found_by_uploads_that_looked(here):
    gone = here.publish({"b": noise(100_000)})
    here.delete(gone)
    here.backend.ahead = 2 * HOUR
    here.collect(grace=HOUR)
    here.push(gone)
    assert len(here.keys("/copies/")) == 2  # of the layer and of the template's
    here.backend.ahead = 4 * HOUR
    report = here.collect(grace=HOUR)
    assert report.bytes > 100_000
    here.restore(gone)
    node(here.directory, here.backend).restore(gone)
    # Where the tombstone is over, things are as if nothing had been.
    here.backend.ahead = 14 * DAY
    here.collect(grace=HOUR)
    assert states(here) == []
    fresh = node(here.directory, here.backend)
    fresh.trees = here.trees
    fresh.push(gone)
    assert fresh.collect().waiting_bytes == 0
    fresh.restore(gone)


@pytest.mark.parametrize("jump", [DAY, -DAY, 365 * DAY])
def test_a_clock_that_jumps_loses_nothing_and_all_is_freed_in_the_end(here, jump):
    kept = here.publish({"a": b"kept"})
    here.delete(here.publish({"b": noise(100_000)}))
    here.backend.ahead = 2 * HOUR
    here.collect(grace=HOUR)
    here.backend.ahead += jump
    later = here.publish({"c": b"later"})
    here.collect(grace=HOUR)
    here.backend.ahead = 4 * HOUR
    here.collect(grace=HOUR)
    for _ in range(4):
        here.backend.ahead += 2 * HOUR
        here.collect(grace=HOUR)
    here.restore(kept)
    here.restore(later)
    assert sum(info.size for info in here.backend.list(f"{TENANT}/packs/")) < 50_000


def test_packs_without_an_index_stay_for_the_grace(here):
    here.publish({"a": b"kept"})
    data = noise(10_000)
    gone = here.publish({"b": data})
    here.delete(gone)
    here.backend.delete(here.keys("/indexes/"))
    # The index of what is kept is written again, as an upload under way would.
    fresh = node(here.directory, here.backend)
    with pytest.raises(IntegrityError, match="no pack"):
        fresh.collect()
    from sojourn.repository.uploads import adopt_unindexed

    orphans = len(here.keys("/packs/"))
    for name in (TENANT, "shared"):
        adopt_unindexed(fresh.domain(name))
    fresh.collect(grace=HOUR)
    assert len(here.keys("/packs/")) == orphans
    fresh.collect()
    assert len(here.keys("/packs/")) < orphans


def test_a_pack_that_is_mostly_dead_is_written_anew(here):
    small = noise(100_000)
    big = here.publish({"small": small, "big": noise(900_000), "bigger": noise(900_000)})
    kept = here.publish({"small": small})
    here.delete(big)
    report = here.collect()
    assert report.rewritten >= 1
    assert report.written_bytes >= 100_000
    left = sum(info.size for info in here.backend.list(f"{TENANT}/packs/"))
    assert left < 110_000
    here.restore(kept)
    node(here.directory, here.backend).restore(kept)
    assert here.collect().bytes == 0


def test_a_pack_that_is_mostly_needed_is_left_as_it_is(here):
    shared = {"a": noise(900_000), "b": noise(900_000)}
    gone = here.publish({**shared, "c": noise(100_000)})
    here.publish(shared)
    packs = here.keys("/packs/")
    here.delete(gone)
    report = here.collect(repack_below=0.5)
    assert set(here.keys(f"{TENANT}/packs/")) <= {*packs, *here.keys("/packs/")}
    assert report.written_bytes < 50_000  # metadata at most


def test_many_indexes_become_few(here):
    kept = [here.publish({"f": noise(100), "n": str(number).encode()}) for number in range(30)]
    assert len(here.keys(f"{TENANT}/indexes/")) == 30
    here.collect()
    assert len(here.keys(f"{TENANT}/indexes/")) == 1
    fresh = node(here.directory, here.backend)
    for snapshot in kept:
        fresh.restore(snapshot)


def test_layers_of_templates_are_needed_by_any_tenant(here):
    first = here.publish({"a": b"1"}, base={"t": b"template one"})
    second = here.publish({"a": b"2"}, base={"t": b"template one"}, tenant="ten_2")
    other = here.publish({"a": b"3"}, base={"t": noise(50_000)}, tenant="ten_3")
    here.delete(first)
    here.delete(other, "ten_3")
    here.collect()
    here.restore(second, "ten_2")
    assert len(here.keys("shared/layers/")) == 1
    assert here.keys("ten_3/packs/") == []


KINDS = ["/snapshots/", "/layers/", "/images/", "/indexes/", "/packs/", "/tombstones/", "listing"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_read_stops_it_and_nothing_is_removed(here, kind, tmp_path):
    kept = here.publish({"a": b"kept", "big": noise(3 << 20)}, memory={"m": noise(100_000)})
    gone = here.publish({"b": noise(10_000)})
    here.delete(gone)
    if kind == "/tombstones/":
        here.collect()
        here.delete(here.publish({"b": noise(10_000)}))
    fresh = node(tmp_path / "fresh", here.backend)
    before = here.keys("")
    if kind == "listing":
        listing = here.backend.list

        def broken(prefix):
            yield from listing(prefix)
            raise IntegrityError("cut off", object="listing")

        here.backend.list = broken
        with pytest.raises(IntegrityError):
            fresh.collect()
        here.backend.list = listing
        assert here.keys("") == before
        return
    stopped = 0
    for key in here.keys(kind):
        data = here.backend.get(key)[0]
        for bad in (None, data[: len(data) // 2], data[:40] + bytes(len(data) - 40)):
            if bad is None:
                here.backend.delete([key])
            else:
                here.backend.put(key, bad)
            fresh = node(tmp_path / "fresh", here.backend)
            standing = set(here.keys("")) - {key}
            try:
                fresh.collect(grace=HOUR)
            except IntegrityError as error:
                stopped += 1
                assert error.details["object"]
            assert standing <= set(here.keys(""))
            here.backend.put(key, data)
    assert stopped
    node(tmp_path / "fresh", here.backend).collect()
    here.restore(kept)
