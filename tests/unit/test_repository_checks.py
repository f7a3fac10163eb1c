"""What a check finds, names, and does not take for a fault."""

from __future__ import annotations

import os

import msgspec
import pytest
from blake3 import blake3

from sojourn.errors import InvalidRequest
from sojourn.repository.checks import ERROR, WARNING, Problem, check, in_part
from sojourn.repository.packs import DATA, META
from sojourn.repository.records import CHUNK
from sojourn.repository.sealed import SESSION
from sojourn.repository.session_records import SessionRecord
from sojourn.repository.uploads import Upload, adopt_unindexed
from support.databases import make_session
from support.dictionaries import DictBackend
from support.repositories import TENANT, Node

SECRET = b"a secret of the operator's"


@pytest.fixture(params=[None, SECRET], ids=["plain", "encrypted"])
def here(request, tmp_path):
    return Node(DictBackend(), tmp_path, request.param)


def found(here, **how) -> list[Problem]:
    """What a process that starts now finds, but for the records of sessions, which these lack."""
    return [one for one in everything(here, **how) if "which has no record" not in one.cause]


def everything(here, **how) -> list[Problem]:
    return list(check(here.backend, here.fresh().domain, **how))


def filled(here):
    small = here.publish({"a": os.urandom(200_000), "b": b"x" * 3000, "sub/c": b"c"})
    large = here.publish(
        {"big": os.urandom(5 << 20), "sub/c": b"c"}, memory={"pages.img": os.urandom(300_000)}
    )
    return small, large


def test_a_whole_repository_has_no_problems(here):
    filled(here)
    assert found(here) == []
    seen = []
    assert found(here, read_data=True, progress=lambda *told: seen.append(told)) == []
    packs = len(here.keys("/packs/"))
    assert seen == [(n + 1, packs) for n in range(packs)]


def test_what_a_crash_or_a_collection_leaves_is_no_problem(here):
    _, large = filled(here)
    with Upload(here.domain()) as up:
        up.add(DATA, blake3(b"never referred to").digest(), b"never referred to")
    here.backend.delete(here.keys(f"{TENANT}/indexes/")[-1:])
    here.delete(large)
    adopt_unindexed(here.fresh().domain())
    here.collect(grace=3600)
    assert found(here, read_data=True) == []
    here.collect()
    assert found(here, read_data=True) == []


def packs_of(here, kind: int, domain: str = TENANT) -> list[str]:
    place = here.domain(domain)
    return [place.pack_key(pack.id) for pack in place.index.packs() if pack.kind == kind]


@pytest.mark.parametrize("kind", [DATA, META])
def test_a_missing_pack_is_found_with_all_that_need_it(here, kind):
    small, large = filled(here)
    for key in packs_of(here, kind):
        data = here.backend.get(key)[0]
        here.backend.delete([key])
        problems = found(here)
        here.backend.put(key, data)
        bad = [problem for problem in problems if problem.object == key]
        assert [problem.cause for problem in bad] == ["It is missing."]
        named = {id for problem in problems for id in problem.snapshots}
        assert named and named <= {small.id, large.id}
        assert all(problem.severity == ERROR for problem in problems)
    assert found(here) == []


def test_the_affected_snapshots_and_sessions_are_exactly_those(here):
    one = here.publish({"one": os.urandom(100_000)})
    own = set(packs_of(here, DATA))
    two = here.publish({"two": os.urandom(100_000)})
    [key] = set(packs_of(here, DATA)) - own
    here.backend.delete([key])
    problems = found(here)
    assert {id for problem in problems for id in problem.snapshots} == {two.id}
    assert {id for problem in problems for id in problem.sessions} == {two.session}
    assert one.id not in str(problems)


def test_a_pack_of_another_size_is_found_without_reading_it(here):
    filled(here)
    for key in here.keys("/packs/"):
        data = here.backend.get(key)[0]
        here.backend.put(key, data + b"more")
        problems = found(here)
        here.backend.put(key, data)
        assert any(p.object == key and "bytes where" in p.cause for p in problems)


def test_one_flipped_bit_anywhere_in_a_pack_is_found_by_reading(here):
    filled(here)
    for key in here.keys("/packs/"):
        data = bytearray(here.backend.get(key)[0])
        for at in {0, 50, len(data) // 3, len(data) // 2, len(data) - 50, len(data) - 1}:
            data[at] ^= 1
            here.backend.put(key, bytes(data))
            assert any(problem.object == key for problem in found(here, read_data=True)), (key, at)
            data[at] ^= 1
        here.backend.put(key, bytes(data))
    assert found(here, read_data=True) == []


def test_parts_cover_all_packs_and_are_the_same_each_time(here):
    for _ in range(12):
        here.publish({"f": os.urandom(1000)})
    keys = here.keys("/packs/")
    for key in keys:
        data = bytearray(here.backend.get(key)[0])
        data[60] ^= 1
        here.backend.put(key, bytes(data))
    hit = [
        {p.object for p in found(here, subset=(n, 5)) if "differ from what was put" in p.cause}
        for n in range(1, 6)
    ]
    assert set().union(*hit) == set(keys)
    assert sum(map(len, hit)) == len(keys)
    assert sum(in_part(os.urandom(32), (2, 4)) for _ in range(4000)) == pytest.approx(1000, abs=200)
    for bad in ((0, 4), (5, 4), (1, 0)):
        with pytest.raises(InvalidRequest):
            found(here, subset=bad)


@pytest.mark.parametrize("part", ["/snapshots/", "/layers/", "/images/", "/indexes/"])
def test_damaged_and_missing_objects_are_named(here, part):
    filled(here)
    for key in here.keys(part):
        data = here.backend.get(key)[0]
        for bad in (data[:30], data[:-1], data[:60] + b"\0\1\2" + data[63:], b""):
            here.backend.put(key, bad)
            problems = found(here)
            assert problems, (key, len(bad))
            if part in ("/snapshots/", "/indexes/"):
                assert any(key.rpartition("/")[2] in p.object for p in problems)
            assert all(p.severity == ERROR for p in problems)
        if part != "/snapshots/":
            here.backend.delete([key])
            assert found(here)
        here.backend.put(key, data)
    assert found(here) == []


def test_one_problem_does_not_hide_the_others(here):
    filled(here)
    broken = [here.keys(part)[0] for part in ("/snapshots/", "/layers/", "/images/")]
    for key in broken:
        here.backend.put(key, b"nonsense")
    problems = found(here, read_data=True)
    assert len({problem.object for problem in problems}) >= 3


def test_a_record_in_the_index_that_the_footer_does_not_have_is_found(here):
    filled(here)
    domain = here.domain()
    pack = next(pack for pack in domain.index.packs() if len(pack) > 1)
    chunks = bytearray(pack.chunks)
    chunks[0] ^= 1
    here.backend.delete(here.keys(f"{TENANT}/indexes/"))
    others = [each for each in domain.index.packs() if each.id != pack.id]
    domain.write_index([*others, msgspec.structs.replace(pack, chunks=bytes(chunks))])
    assert len(chunks) % CHUNK.size == 0
    problems = found(here)
    assert any("do not agree" in p.cause for p in problems)


def test_what_nothing_needs_is_a_warning(here):
    filled(here)
    here.backend.put(f"{TENANT}/packs/zz/stranger", b"?")
    gone = here.publish({"gone": os.urandom(1000)})
    before = {p.object for p in found(here)}
    here.delete(gone)
    unneeded = [key for key in packs_of(here, DATA)][-1]
    here.backend.delete([unneeded])
    problems = found(here)
    assert {p.object for p in problems} == before | {unneeded}
    assert {p.severity for p in problems} == {WARNING}


def test_only_the_domains_asked_for(here):
    filled(here)
    other = here.publish({"x": b"y"}, tenant="ten_2")
    key = here.domain("ten_2").snapshot_key(other.id)
    here.backend.put(key, b"nonsense")
    assert found(here, only=[TENANT]) == []
    assert [p.domain for p in found(here, only=["ten_2"])] == ["ten_2"]


def test_what_else_lies_in_the_same_place_is_left_alone(here):
    kept, _ = filled(here)
    for key in ("notes.txt", "other/file", "-odd-/x/y", "a..b/packs/aa/aa"):
        here.backend.put(key, b"not ours")
    assert found(here, read_data=True) == []
    here.collect()
    assert {"notes.txt", "other/file", "-odd-/x/y", "a..b/packs/aa/aa"} <= set(here.keys(""))
    here.restore(kept)


def recorded(here, snapshot) -> None:
    """Write the record of a session of which this is the head."""
    session = make_session(id=snapshot.session, tenant=TENANT, head=snapshot.id)
    record = SessionRecord(session, [], 0.0, "srv_1")
    here.domain().put_object(
        SESSION, f"{TENANT}/sessions/{session.id}", msgspec.msgpack.encode(record)
    )


def test_snapshots_of_a_session_without_a_record_are_told_of(here):
    first = here.publish({"a": b"1"})
    second = here.push(
        msgspec.structs.replace(here.snapshot({"a": b"2"}), session="ses_2", parent=first.id)
    )
    lone = [one for one in everything(here) if "which has no record" in one.cause]
    assert [(one.severity, one.sessions, one.snapshots) for one in lone] == [
        (WARNING, ["ses_1"], [first.id]),
        (WARNING, ["ses_2"], [second.id]),
    ]
    # What a session with a record descends from is kept for that one.
    recorded(here, second)
    assert [one for one in everything(here) if "which has no record" in one.cause] == []
    other = here.publish({"a": b"3"})
    [problem] = [one for one in everything(here) if "which has no record" in one.cause]
    assert (problem.sessions, problem.snapshots) == (["ses_1"], [other.id])


def test_what_only_a_head_refers_to_is_no_sign_of_a_loss(here):
    taken = here.publish({"a": b"1"})
    recorded(here, msgspec.structs.replace(taken, session="ses_2"))
    assert [one for one in everything(here) if "which has no record" in one.cause] == []
