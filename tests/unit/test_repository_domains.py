"""A domain: objects for their own key alone, errors that name it, an index that is loaded once."""

from __future__ import annotations

import threading

import msgspec
import pytest

from sojourn.errors import Conflict, IntegrityError, ObjectMissing, StoreUnreachable, TooLarge
from sojourn.repository import domains
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.domains import Domain
from sojourn.repository.keys import Keyring
from sojourn.repository.records import PACK_HEADER
from sojourn.repository.sealed import INDEX, LAYER, SESSION, SNAPSHOT, seal
from support.packs import CLOSED, OPEN, ROOT, made_up, make_pack, name_of

BOTH = pytest.mark.parametrize("keys", [OPEN, CLOSED], ids=["open", "encrypted"])


class Counting:
    """A backend that notes what it is asked."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.asked: list[tuple[str, str]] = []
        self.failing = False

    def __getattr__(self, name):
        act = getattr(self.inner, name)
        if name not in {"get", "put", "head", "list", "delete", "get_tail", "get_ranges"}:
            return act

        def asked(first, *rest, **options):
            self.asked.append((name, first))
            if self.failing:
                raise StoreUnreachable("no answer")
            return act(first, *rest, **options)

        return asked


@pytest.fixture
def backend():
    return Counting(open_backend("memory:"))


def test_keys_are_those_of_the_format():
    domain = Domain(open_backend("memory:"), CLOSED)
    id = bytes(range(32))
    assert domain.pack_key(id) == domain.pack_key(id.hex()) == f"ten_1/packs/00/{id.hex()}"
    assert domain.layer_key("abc") == f"ten_1/layers/{CLOSED.object_name('layers', 'abc')}"
    assert domain.image_key("abc") == f"ten_1/images/{CLOSED.object_name('images', 'abc')}"
    assert domain.snapshot_key("snp_1") == "ten_1/snapshots/snp_1"
    assert domain.session_key("ses_1") == "ten_1/sessions/ses_1"
    assert "abc" not in domain.layer_key("abc") + domain.image_key("abc")
    for act in (lambda: domain.key("config", "x"), lambda: domain.ids("keys")):
        with pytest.raises(ValueError):
            act()


@BOTH
def test_an_object_comes_back_from_its_own_key_alone(backend, keys):
    domain = Domain(backend, keys)
    here, there = domain.snapshot_key("snp_1"), domain.snapshot_key("snp_2")
    version = domain.put_object(SNAPSHOT, here, b"payload")
    assert domain.get_object(SNAPSHOT, here) == b"payload"
    assert domain.read_object(SNAPSHOT, here) == (b"payload", version)
    data, _ = backend.get(here)
    backend.put(there, data)
    backend.put("ten_2/snapshots/snp_1", data)
    other = Domain(backend, Keyring(ROOT, keys.encrypted).domain("ten_2"))
    for reader, kind, key in (
        (domain, SNAPSHOT, there),
        (domain, LAYER, here),
        (other, SNAPSHOT, "ten_2/snapshots/snp_1"),
    ):
        with pytest.raises(IntegrityError) as caught:
            reader.get_object(kind, key)
        assert caught.value.details["object"] == key and key in caught.value.message


@BOTH
def test_a_session_record_is_swapped_not_overwritten(backend, keys):
    domain = Domain(backend, keys)
    key = domain.session_key("ses_1")
    first = domain.put_object(SESSION, key, b"1", create=True)
    with pytest.raises(Conflict):
        domain.put_object(SESSION, key, b"x", create=True)
    second = domain.put_object(SESSION, key, b"2", replaces=first)
    with pytest.raises(Conflict):
        domain.put_object(SESSION, key, b"3", replaces=first)
    assert domain.read_object(SESSION, key) == (b"2", second)


def test_a_missing_object_is_missing_and_a_huge_one_is_not_read(backend):
    domain = Domain(backend, OPEN)
    with pytest.raises(ObjectMissing):
        domain.get_object(SNAPSHOT, domain.snapshot_key("snp_1"))
    with pytest.raises(TooLarge):
        domain.put_object(SNAPSHOT, domain.snapshot_key("snp_1"), bytes((16 << 20) + 1))
    backend.put(domain.snapshot_key("snp_1"), bytes((16 << 20) + 1000))
    with pytest.raises(IntegrityError):
        domain.get_object(SNAPSHOT, domain.snapshot_key("snp_1"))


def test_objects_are_listed_by_group(backend):
    domain = Domain(backend, OPEN)
    keys = [domain.snapshot_key(f"snp_{number}") for number in range(3)]
    for key in keys:
        domain.put_object(SNAPSHOT, key, b"")
    domain.put_object(LAYER, domain.layer_key("l"), b"")
    assert sorted(info.key for info in domain.ids("snapshots")) == keys
    assert [info.key for info in domain.ids("layers")] == [domain.layer_key("l")]
    assert not list(Domain(backend, Keyring(ROOT, False).domain("ten_2")).ids("snapshots"))


@BOTH
def test_an_index_that_was_written_is_found_by_the_next(backend, keys):
    domain = Domain(backend, keys)
    contents = [b"one", b"two" * 500]
    data, info = make_pack(keys, [contents])
    backend.put(domain.pack_key(info.id), data)
    [key] = domain.write_index([info])
    for reader in (domain, Domain(backend, keys)):
        for chunk in contents:
            place = reader.index.find(name_of(keys, chunk))
            assert place is not None and place.pack == info
    assert domain.read_index(key) == [info]
    assert domain.write_index([]) == []


@BOTH
def test_an_index_is_proven_by_its_name_and_its_seal(backend, keys):
    domain = Domain(backend, keys)
    [key] = domain.write_index([made_up([bytes(32)])])
    data, _ = backend.get(key)
    bad = {
        key: data[:-1] + bytes([data[-1] ^ 1]),
        "ten_1/indexes/" + "0" * 64: data,
        "ten_1/indexes/x": data,
    }
    for at, content in bad.items():
        backend.put(at, content)
        with pytest.raises(IntegrityError) as caught:
            domain.read_index(at)
        assert caught.value.details["object"] == at
        # Passed over, and told to who then misses something; a strict reading refuses.
        reader = Domain(backend, keys)
        assert len(reader.index) == (0 if at == key else 1)
        fault = reader.refresh_index()
        assert fault is not None and fault.details["object"] == at
        with pytest.raises(IntegrityError):
            reader.index.refresh()
        backend.delete([at])
        backend.put(key, data)
    backend.delete([key])
    assert len(Domain(backend, keys).index) == 0


def test_an_index_of_another_domain_is_not_taken(backend):
    one, two = (Domain(backend, Keyring(ROOT, True).domain(name)) for name in ("ten_1", "ten_2"))
    [key] = one.write_index([made_up([bytes(32)])])
    data, _ = backend.get(key)
    moved = key.replace("ten_1", "ten_2")
    backend.put(moved, data)
    with pytest.raises(IntegrityError):
        two.read_index(moved)


def test_large_indexes_are_written_in_portions(backend, monkeypatch):
    monkeypatch.setattr(domains, "_INDEX_BYTES", 1000)
    domain = Domain(backend, OPEN)
    infos = [made_up([bytes([at]) * 32 for _ in range(10)]) for at in range(10)]
    keys = domain.write_index(infos)
    assert len(set(keys)) == 5
    again = Domain(backend, OPEN)
    assert sorted(info.id for info in again.index.packs()) == sorted(info.id for info in infos)


def test_the_index_is_loaded_once_by_however_many_threads(backend):
    Domain(backend, OPEN).write_index([made_up([bytes(32)])])
    domain = Domain(backend, OPEN)
    backend.asked.clear()
    found = []
    threads = [threading.Thread(target=lambda: found.append(domain.index)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8 and all(index is found[0] for index in found)
    assert [name for name, _ in backend.asked] == ["list", "get"]


def test_an_index_that_could_not_be_loaded_is_tried_again(backend):
    Domain(backend, OPEN).write_index([made_up([bytes(32)])])
    domain = Domain(backend, OPEN)
    backend.failing = True
    with pytest.raises(StoreUnreachable):
        domain.index  # noqa: B018
    backend.failing = False
    assert len(domain.index) == 1


def test_only_what_is_there_is_remembered(backend):
    domain = Domain(backend, OPEN)
    assert not domain.has_layer("l") and not domain.has_image("l")
    domain.put_object(LAYER, domain.layer_key("l"), b"")
    assert domain.has_layer("l") and not domain.has_image("l")
    backend.asked.clear()
    assert domain.has_layer("l")
    assert not backend.asked
    backend.delete([domain.layer_key("l")])
    domain.forget([domain.image_key("l")])
    assert domain.has_layer("l")
    domain.forget([domain.layer_key("l")])
    assert not domain.has_layer("l")
    domain.note(domain.layer_key("m"))
    assert domain.has_layer("m")
    domain.forget()
    assert not domain.has_layer("m")
    backend.failing = True
    with pytest.raises(StoreUnreachable):
        domain.has_layer("m")


def test_a_domain_shows_no_key(backend):
    domain = Domain(backend, CLOSED)
    shown = f"{domain!r} {vars(domain)}"
    for secret in (ROOT, CLOSED.naming, CLOSED.sealing):
        assert repr(secret) not in shown and secret.hex() not in shown


def test_a_forged_index_under_a_good_seal_is_refused(backend):
    from blake3 import blake3

    info = made_up([bytes(32)])
    lying = msgspec.structs.replace(info, size=PACK_HEADER.size)
    data = seal(INDEX, msgspec.msgpack.encode([lying]), OPEN, b"ten_1/indexes/")
    key = f"ten_1/indexes/{blake3(data).hexdigest()}"
    backend.put(key, data)
    with pytest.raises(IntegrityError, match="inconsistent"):
        Domain(backend, OPEN).read_index(key)
