"""Archives that were never written by an export, with a digest that holds, as anyone can make them:
refused before anything of them is used, in bounded memory."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.errors import ArchiveInvalid, Interrupted, SojournError, StoreKeyInvalid
from sojourn.model.snapshots import MemoryRef
from sojourn.repository import archive_checks
from sojourn.repository.backends.archive_file import HEADER
from sojourn.repository.cutting import encode_recipe, zeros_id
from sojourn.repository.images import RECORD, ImageMap, encode_image
from sojourn.repository.packs import CHUNK_RECIPE
from sojourn.repository.sealed import IMAGE
from sojourn.store.fingerprints import image_digest
from sojourn.store.manifests import Entry
from support.archives import Forger, data_of, entry, joined, objects, opened
from support.repositories import node

ROOT = entry(b"", "d")
MIB = 1 << 20


def refused(data: bytes, saying: str = "") -> None:
    with pytest.raises(ArchiveInvalid) as caught:
        opened(data)
    assert saying in caught.value.message, caught.value.message


def with_layer(entries: list[Entry], contents: list[bytes]) -> bytes:
    forger = Forger()
    layer = forger.layer(entries, contents)
    return forger.finish(forger.snapshot(layer))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An honest archive of two snapshots with memory."""
    here = node(tmp_path_factory.mktemp("node"))
    first = here.snapshot({"a": b"one"}, memory={"pages.img": os.urandom(100_000)})
    second = here.snapshot({"a": b"one"}, {"large": os.urandom(MIB + 5), "b": b"two"})
    return data_of(here, [first, msgspec.structs.replace(second, parent=first.id)])


def test_the_forger_makes_what_is_taken(whole: bytes) -> None:
    data = with_layer([ROOT, entry(b"a", content=b"one"), entry(b"b", "l", target=b"/x")], [b"one"])
    assert opened(data).record.session.name == "box"
    assert joined(objects(whole)) == whole


# -- the file -----------------------------------------------------------------------------------


def test_every_cut_and_every_addition_is_refused(whole: bytes) -> None:
    for length in [*range(0, 60), len(whole) // 2, *range(len(whole) - 60, len(whole))]:
        refused(whole[:length])
    for added in (b"\0", b"SJAE", whole[-40:], whole):
        refused(whole + added)


def test_directories_that_cannot_be(whole: bytes) -> None:
    parts = objects(whole)
    listed = [(key, len(data)) for key, data in parts]

    def directory(entries: object) -> bytes:
        return joined(parts, directory=msgspec.msgpack.encode(entries))

    name = listed[0][0]
    refused(directory([*listed, (name, 0)]), "twice")
    refused(directory([(name, listed[0][1] - 1), *listed[1:]]), "do not fill")
    refused(directory([(name, listed[0][1] + 1), *listed[1:]]), "do not fill")
    refused(directory([(name, 2**63 - 1), *listed[1:]]), "do not fill")
    refused(directory([*listed, ("session/x", -5)]), "size of -5")
    refused(directory(listed[:-1]), "do not fill")
    for bad in ("../x", "/etc/passwd", "a//b", "a/../b", "", "a\0b", "x" * 1000, "session/é"):
        refused(directory([(bad, listed[0][1]), *listed[1:]]), "names an object")
    for nonsense in ({}, [1], [["a"]], [["a", "b"]], "x", [[b"\xff", 1]], None):
        refused(directory(nonsense))
    refused(joined(parts, header=HEADER.pack(b"SJAR", 2, 0)), "format 2")
    refused(joined(parts, header=HEADER.pack(b"SJAR", 1, 7)))
    refused(joined(parts, header=HEADER.pack(b"SJRS", 1, 0)), "no archive")


def test_objects_more_or_less_or_elsewhere(whole: bytes) -> None:
    parts = objects(whole)
    for number, (key, data) in enumerate(parts):
        rest = parts[:number] + parts[number + 1 :]
        refused(joined(rest))
        refused(joined([*parts, (key[:-1] + ("0" if key[-1] != "0" else "1"), data)]))
        refused(joined([*rest, (key[:-1] + ("0" if key[-1] != "0" else "1"), data)]))
        refused(joined([*rest, (key, data[:-1])]))
        refused(joined([*rest, (key, data + b"\0")]))
    for key in ("tenants/ten_1", "session/tombstones/x", "extra", "shared/snapshots/x", "keys/x"):
        refused(joined([*parts, (key, bytes(100))]))
    pack = next((key, data) for key, data in parts if "/packs/" in key)
    refused(joined([*parts, (f"session/packs/00/{'0' * 64}", pack[1])]))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_byte_of_any_object(whole: bytes, data: st.DataObject) -> None:
    parts = objects(whole)
    number = data.draw(st.integers(0, len(parts) - 1))
    key, content = parts[number]
    at = data.draw(st.integers(0, len(content) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    bad = content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
    with pytest.raises((ArchiveInvalid, StoreKeyInvalid)):
        opened(joined([*parts[:number], (key, bad), *parts[number + 1 :]]))


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=300), directory=st.binary(max_size=200))
def test_any_bytes(content: bytes, directory: bytes) -> None:
    for data in (content, joined([("config", content)]), joined([], directory=directory)):
        with pytest.raises(SojournError):
            opened(data)


# -- manifests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entries",
    [
        [entry(b"..", content=b"x")],
        [entry(b"../x", content=b"x")],
        [entry(b"/etc/passwd", content=b"x")],
        [entry(b"a", "d"), entry(b"a/..", "d"), entry(b"a/../b", content=b"x")],
        [entry(b"a", content=b"x"), entry(b"a", content=b"x")],
        [entry(b"b", content=b"x"), entry(b"a", content=b"x")],
        [entry(b"l", "l", target=b"/etc"), entry(b"l/passwd", content=b"x")],
        [entry(b"a\0b", content=b"x")],
        [entry(b"a", content=b"x", link=b"/etc/passwd")],
        [entry(b"a", content=b"x", link=b"b"), entry(b"b", content=b"x")],
        [entry(b"a" * 256, content=b"x")],
        [entry(b"a", "c", major=1 << 20)],
        [entry(b"a", content=b"x", uid=2**32 - 1)],
        [entry(b"a", content=b"x", xattrs=((b"trusted.overlay.redirect", b"/etc"),))],
        [entry(b"a", "?")],
    ],
    ids=repr,
)
def test_trees_that_lead_out_or_cannot_be(entries: list[Entry]) -> None:
    refused(with_layer([ROOT, *entries], [b"x"]))


def test_sizes_that_are_not_those_of_the_content() -> None:
    lie = msgspec.structs.replace(entry(b"a", content=b"x"), size=5)
    refused(with_layer([ROOT, lie], [b"x"]), "another size")
    refused(with_layer([ROOT, entry(b"a", content=b"x")], []), "lacks a chunk")


def test_chunks_that_nothing_uses() -> None:
    refused(with_layer([ROOT, entry(b"a", content=b"x")], [b"x", b"y"]), "nothing in it uses")


# -- bombs --------------------------------------------------------------------------------------


def test_what_will_be_written_is_known_before(tmp_path: Path) -> None:
    """A thousand names of one content cost the archive nothing, the disk a thousand times."""
    content = os.urandom(MIB)
    entries = [ROOT, *(entry(b"%04d" % number, content=content) for number in range(1000))]
    data = with_layer(entries, [content])
    assert len(data) < 2 * MIB
    assert opened(data).needed >= 1000 * MIB


def recipe_of(forger: Forger, size: int) -> Entry:
    """A file of zeros that needs no chunk."""
    digest = blake3(b"whatever").digest()
    length = 4 * MIB
    recipe = encode_recipe([(zeros_id(length), length)] * (size // length))
    forger.chunk(recipe, CHUNK_RECIPE, digest)
    return msgspec.structs.replace(entry(b"z"), size=size, digest=digest)


def test_zeros_are_counted_too() -> None:
    forger = Forger()
    zeros = recipe_of(forger, 1 << 36)
    names = [msgspec.structs.replace(zeros, path=b"%02d" % number) for number in range(17)]
    refused(forger.finish(forger.snapshot(forger.layer([ROOT, *names]))), "at most")


def test_manifests_larger_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [ROOT, *(entry(b"%06d" % number, "d") for number in range(20_000))]
    data = with_layer(entries, [])
    assert opened(data)
    monkeypatch.setattr(archive_checks, "MANIFEST_BYTES", 100_000)
    refused(data, "would have")
    monkeypatch.undo()
    monkeypatch.setattr(archive_checks, "RATIO", 0)
    monkeypatch.setattr(archive_checks, "_SLACK", 100_000)
    refused(data, "of memory")


def test_memory_stays_in_proportion() -> None:
    """Blocks that unpack to a thousand times their size are not unpacked where nothing uses them,
    and nothing is held of those that are."""
    forger = Forger()
    layer = forger.layer([ROOT])
    for number in range(40):
        forger.chunk(bytes(7 * MIB) + bytes([number]))
    data = forger.finish(forger.snapshot(layer))
    assert len(data) < 2 * MIB
    tracemalloc.start()
    try:
        refused(data)
        assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    finally:
        tracemalloc.stop()


# -- snapshots and images -----------------------------------------------------------------------


def test_snapshots_that_descend_wrongly() -> None:
    forger = Forger()
    refused(forger.finish(forger.snapshot(parent="snp_" + "0" * 24)), "not in it")
    forger = Forger()
    ids = ["snp_" + "a" * 24, "snp_" + "b" * 24]
    forger.snapshot(id=ids[0], parent=ids[1])
    forger.snapshot(id=ids[1], parent=ids[0])
    refused(forger.finish(*ids), "descend from one another")
    forger = Forger()
    refused(forger.finish(forger.snapshot(), head="snp_" + "0" * 24), "stands at")
    forger = Forger()
    refused(
        forger.finish(
            forger.snapshot(id="snp_1"),
        ),
        "no id",
    )


def test_two_records_and_snapshots_nobody_names() -> None:
    forger = Forger()
    one, other = forger.snapshot(), forger.snapshot()
    refused(forger.finish(one), "those its session names")
    forger = Forger()
    one = forger.snapshot()
    refused(forger.finish(one, one), "those its session names")
    del other


@pytest.mark.parametrize("name", ["../x", "/x", "a/../b", "", "a\0"])
def test_images_that_lead_out(name: str) -> None:
    content = os.urandom(10)
    files = {name: (10, blake3(content).hexdigest())}
    ref = MemoryRef(image_digest(files), 10, files, "gvisor", "r", [])
    forger = Forger()
    forger.chunk(content)
    image = ImageMap(ref, blake3(content).digest(), {name: RECORD.pack(10, 1, 0)})
    forger.domain.put_object(IMAGE, forger.domain.image_key(ref.id), encode_image(image))
    refused(forger.finish(forger.snapshot(memory=ref)))


def test_fingerprints_hold(whole: bytes) -> None:
    forger = Forger()
    refused(forger.finish(forger.snapshot(fingerprint="0" * 64)), "fingerprint")


# -- what only shows when it is taken out -------------------------------------------------------


def test_a_recipe_that_gives_another_file(tmp_path: Path) -> None:
    forger = Forger()
    layer = forger.layer([ROOT, recipe_of(forger, 8 * MIB)])
    archive = opened(forger.finish(forger.snapshot(layer)))
    with pytest.raises(ArchiveInvalid):
        archive.fetch_layer(layer.id, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_given_up_half_way(whole: bytes, tmp_path: Path) -> None:
    import threading

    from sojourn.repository.archives import open_archive
    from sojourn.repository.backends.archive_file import ArchiveReader

    place = tmp_path / "archive"
    place.write_bytes(whole)
    stop = threading.Event()
    with place.open("rb") as file:
        reader = ArchiveReader(file.fileno(), stop=stop)
        stop.set()
        with pytest.raises(Interrupted):
            open_archive(reader, None)
