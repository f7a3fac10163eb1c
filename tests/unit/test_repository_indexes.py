"""The index: every place of every name, none that is to be avoided, while others change it."""

from __future__ import annotations

import os
import random
import threading
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.errors import IntegrityError, ObjectMissing, StoreUnreachable
from sojourn.repository import indexes, tables
from sojourn.repository.indexes import Index, decode_index, encode_index
from sojourn.repository.records import MAX_CHUNKS
from support.packs import made_up

# Names that begin alike are the hard case of the sorted runs; there are no such hashes at will.
NAMES = [head + bytes([tail]) for head in (b"aaaa", b"aaab", b"zzzz") for tail in range(9)]
NAMES = [name.ljust(32, b"\0") for name in NAMES]


class Objects:
    """Index objects in a dict, as a store would list and give them."""

    def __init__(self, **named) -> None:
        self.named = dict(named)
        self.reads: list[str] = []
        self.listings = 0

    def listing(self) -> list[str]:
        self.listings += 1
        return sorted(self.named)

    def reading(self, key: str):
        self.reads.append(key)
        if key not in self.named:
            raise ObjectMissing(f"no {key}", object=key)
        found = self.named[key]
        if isinstance(found, Exception):
            raise found
        return list(found)

    def index(self) -> Index:
        return Index(self.listing, self.reading)


def ids(places) -> list[bytes]:
    return sorted(place.pack.id for place in places)


def test_an_index_is_given_back():
    infos = [made_up([os.urandom(32) for _ in range(size)]) for size in (1, 5, 100)]
    assert decode_index(encode_index(infos)) == infos
    assert decode_index(encode_index([])) == []


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x80", b"\x91\x80", b"\x91\x90", b"\xdd\xff\xff\xff\xff", b"\x91\xc4\x01a",
     msgspec.msgpack.encode([[b"", 0, 0, b"", b"", b""]]),
     msgspec.msgpack.encode([["x", 0, 0, bytes(32), b"", b""]]),
     msgspec.msgpack.encode([[*msgspec.structs.astuple(made_up([bytes(32)])), 1]])],
)  # fmt: skip
def test_a_malformed_index_is_refused(payload):
    with pytest.raises(IntegrityError) as caught:
        decode_index(payload, name="index 1")
    assert caught.value.details["object"] == "index 1"


def test_an_index_of_too_many_packs_is_refused(monkeypatch):
    monkeypatch.setattr(indexes, "MAX_PACKS", 2)
    infos = [made_up([bytes(32)]) for _ in range(3)]
    with pytest.raises(ValueError):
        encode_index(infos)
    monkeypatch.setattr(indexes, "MAX_PACKS", 3)
    payload = encode_index(infos)
    monkeypatch.setattr(indexes, "MAX_PACKS", 2)
    with pytest.raises(IntegrityError):
        decode_index(payload)


PACK = st.lists(st.sampled_from(NAMES), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), PACK),
            st.tuples(st.just("bulk"), st.lists(PACK, max_size=4)),
            st.tuples(st.just("remove"), st.integers(0, 20)),
            st.tuples(st.just("back"), st.integers(0, 20)),
            st.tuples(st.just("exclude"), st.integers(0, 20)),
        ),
        max_size=14,
    ),
    st.sampled_from([0, 3, 10, 1 << 15]),
    st.sampled_from([4, 20, 1 << 21]),
    st.integers(0, 1 << 20),
)
def test_it_answers_what_a_plain_list_would(steps, recent, run, chance):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexes, "_RECENT", recent)
        patch.setattr(indexes, "RUN", run)
        patch.setattr(tables, "RUN", run)
        patch.setattr(tables, "_PIECE", 3)
        patch.setattr(tables, "_BUCKET", 1 + chance % 4)
        objects = Objects()
        index = objects.index()
        all, living, excluded = [], {}, set()
        for step, what in steps:
            if step == "add":
                info = made_up(what)
                all.append(info)
                living[info.id] = info
                index.add(info)
            elif step == "bulk":
                infos = [made_up(names) for names in what]
                all += infos
                living |= {info.id: info for info in infos}
                key = f"i{len(objects.named)}"
                objects.named[key] = infos
                index.refresh()
            elif all:
                info = all[what % len(all)]
                if step == "remove":
                    living.pop(info.id, None)
                    index.remove([info.id])
                elif step == "back":
                    living[info.id] = info
                    index.add(info)
                else:
                    excluded.add(info.id)
                    index.exclude([info.id])
        assert sorted(info.id for info in index.packs()) == sorted(living)
        assert len(index) == sum(map(len, living.values()))
        assert index.excluded == excluded
        rng = random.Random(chance)
        for name in [*NAMES, b"?" * 32, b"", NAMES[0][:31]]:
            expected = {
                (info.id, offset)
                for info in living.values()
                for other, _, offset, _ in info.records()
                if other == name
            }
            places = index.places(name)
            assert {(place.pack.id, place.offset) for place in places} == expected
            assert len(places) == len(expected)
            for place in places:
                assert place.pack.chunk(place.offset // 10) == (name, *place[1:])
            avoid = {id for id in living if rng.random() < 0.4}
            found = index.find(name, avoid)
            allowed = {at for at in expected if at[0] not in avoid | excluded}
            if found is None:
                assert not allowed
            else:
                assert (found.pack.id, found.offset) in allowed
            located = index.locate(name)
            assert (located is None) == (not expected)
            assert located is None or (located.pack.id, located.offset) in expected


def test_many_packs_of_random_names_are_all_found(monkeypatch):
    monkeypatch.setattr(indexes, "_RECENT", 500)
    rng = random.Random(3)
    infos = [made_up([rng.randbytes(32) for _ in range(rng.randrange(1, 300))]) for _ in range(100)]
    one_by_one = Index()
    for info in infos:
        one_by_one.add(info)
    at_once = Objects(i=infos).index()
    at_once.refresh()
    for index in (one_by_one, at_once):
        for info in infos:
            for number, (name, *where) in enumerate(info.records()):
                place = index.find(name)
                assert place is not None and place.pack is not None
                assert place.pack.id == info.id and [*place[1:]] == where
                assert info.chunk(number)[0] == name
        assert not any(index.find(rng.randbytes(32)) for _ in range(1000))


def test_refresh_reads_what_is_new_and_forgets_what_vanished():
    a, b, c = (made_up([name]) for name in NAMES[:3])
    objects = Objects(one=[a, b], two=[b])
    index = objects.index()
    index.refresh()
    assert objects.reads == ["one", "two"] and objects.listings == 1
    index.refresh()
    assert objects.reads == ["one", "two"]
    objects.named["three"] = [c]
    del objects.named["one"]
    index.refresh()
    assert objects.reads == ["one", "two", "three"]
    assert index.find(NAMES[0]) is None and index.pack(a.id) is None
    assert index.find(NAMES[1]) and index.find(NAMES[2]) and index.pack(c.id) == c
    objects.named["four"] = [a]
    index.refresh()
    assert index.find(NAMES[0])


def test_what_this_process_wrote_is_not_read_again_and_vanishes_like_all_else():
    a, b = made_up(NAMES[:1]), made_up(NAMES[1:2])
    objects = Objects()
    index = objects.index()
    index.add(a)
    index.add(b)
    objects.named["mine"] = [a]
    index.name("mine", [a])
    index.refresh()
    assert not objects.reads
    del objects.named["mine"]
    index.refresh()
    assert index.find(NAMES[0]) is None
    assert index.find(NAMES[1])  # in no index object yet; the store acknowledged it


def test_an_index_object_replaced_during_the_listing_costs_nothing():
    a, b = made_up(NAMES[:1]), made_up(NAMES[1:2])
    objects = Objects(old=[a, b])
    index = objects.index()
    index.refresh()

    answers = [[], ["new"]]  # the first listing's pages missed both

    def listing():
        objects.named = {"new": [a]}
        return answers.pop(0)

    index._listing = listing
    index.refresh()
    assert index.find(NAMES[0]) and not index.find(NAMES[1])


def test_an_index_object_that_goes_between_listing_and_reading_is_listed_again():
    a = made_up(NAMES[:1])
    objects = Objects(old=[a])
    index = objects.index()
    real = objects.reading

    def reading(key):
        if key == "old":
            objects.named = {"new": [a]}
        return real(key)

    index._reading = reading
    index.refresh()
    assert index.find(NAMES[0]) and objects.reads == ["old", "new"]


def test_it_gives_up_on_index_objects_that_never_stand_still():
    objects = Objects()
    index = objects.index()
    index._listing = lambda: ["gone"]
    with pytest.raises(IntegrityError):
        index.refresh()


def test_a_damaged_index_object_stops_all_but_who_asks_for_faults():
    a = made_up(NAMES[:1])
    damage = IntegrityError("damaged", object="bad")
    objects = Objects(bad=damage, good=[a])
    index = objects.index()
    with pytest.raises(IntegrityError):
        index.refresh()
    faults: list[IntegrityError] = []
    index.refresh(faults)
    assert faults == [damage] and index.find(NAMES[0])
    objects.named["bad"] = [made_up(NAMES[1:2])]
    index.refresh()
    assert index.find(NAMES[1])


def test_other_failures_of_reading_are_passed_on():
    objects = Objects(bad=StoreUnreachable("no answer"), good=[made_up(NAMES[:1])])
    with pytest.raises(StoreUnreachable):
        objects.index().refresh([])


def test_indexes_that_disagree_about_a_pack_are_refused():
    a = made_up(NAMES[:2])
    other = msgspec.structs.replace(a, salt=b"s" * 32)
    for objects in (Objects(one=[a], two=[other]), Objects(one=[a, other])):
        with pytest.raises(IntegrityError, match="disagree"):
            objects.index().refresh()
    objects = Objects(one=[a])
    index = objects.index()
    index.refresh()
    objects.named["two"] = [other]
    with pytest.raises(IntegrityError) as caught:
        index.refresh()
    assert caught.value.details["object"] == "two"
    assert index.find(NAMES[0]).pack == a
    objects.named["one-and-a-half"] = [made_up(NAMES[5:6])]
    with pytest.raises(IntegrityError):
        index.refresh()
    assert index.find(NAMES[5]) is None
    faults: list[IntegrityError] = []
    index.refresh(faults)
    assert [fault.details["object"] for fault in faults] == ["two"]
    assert index.find(NAMES[5]) and index.find(NAMES[0]).pack == a
    del objects.named["two"]
    index.refresh()


def test_readers_see_what_was_added_while_others_add_remove_and_refresh(monkeypatch):
    monkeypatch.setattr(indexes, "_RECENT", 50)
    rng = random.Random(4)
    lasting = [made_up([rng.randbytes(32) for _ in range(40)]) for _ in range(10)]
    passing = [made_up([rng.randbytes(32) for _ in range(40)]) for _ in range(60)]
    objects = Objects(one=lasting[:5])
    index = objects.index()
    index.refresh()
    for info in lasting[5:]:
        index.add(info)
    names = [name for info in lasting for name in info.names()]
    stop = threading.Event()
    wrong: list[object] = []

    def read():
        turn = random.Random(5)
        while not stop.is_set():
            name = turn.choice(names)
            place = index.find(name)
            if place is None or place.pack.name(place.offset // 10) != name:
                wrong.append((name, place))
            if len(index.places(name)) != 1 or index.locate(name) is None:
                wrong.append(name)

    def change(mine):
        for round in range(4):
            for info in mine:
                index.add(info)
            objects.named[f"{mine[0].id.hex()}{round}"] = mine
            index.refresh()
            index.exclude([mine[0].id])
            index.remove([info.id for info in mine])

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=change, args=(passing[at::3],)) for at in range(3)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join(60)
    stop.set()
    for thread in readers:
        thread.join(60)
    assert not wrong
    assert {info.id for info in index.packs()} >= {info.id for info in lasting}


def test_a_chunk_takes_little_memory():
    count, size = 40, 2500
    names = os.urandom(32 * count * size)
    packs = [
        made_up([names[at * 32 : at * 32 + 32] for at in range(pack * size, (pack + 1) * size)])
        for pack in range(count)
    ]
    payload = encode_index(packs)
    del packs, names
    tracemalloc.start()
    try:
        index = Objects(i=decode_index(payload)).index()
        index._reading = lambda key: decode_index(payload)
        index.refresh()
        index._reading = index._listing = lambda *_: []
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == count * size
    assert all(index.find(pack.name(at)) for pack in index.packs() for at in range(0, size, 50))
    assert kept < 70 * count * size
    assert peak < 200 * count * size


def test_the_largest_pack_is_checked_and_found():
    names = [number.to_bytes(32, "little") for number in range(MAX_CHUNKS)]
    [info] = decode_index(encode_index([made_up(names)]))
    index = Index()
    index.add(info)
    assert all(index.find(name) for name in names[::1000])
    with pytest.raises(IntegrityError):
        decode_index(encode_index([made_up([*names, b"x" * 32])]))
