"""What is counted as needed by one alone, shared, and dead."""

from __future__ import annotations

import os

import msgspec
import pytest

from sojourn.errors import IntegrityError
from sojourn.repository.accounting import Accounts, account
from support.dictionaries import DictBackend
from support.repositories import TENANT, Node


@pytest.fixture
def here(tmp_path):
    return Node(DictBackend(), tmp_path)


def counted(here) -> Accounts:
    return account(here.backend, here.fresh().domain)


def of_session(snapshot, session: str):
    return msgspec.structs.replace(snapshot, session=session)


def about(size: int):
    """Lists of files take a little besides."""
    return pytest.approx(size, abs=3000)


def test_unique_shared_and_logical_bytes(here):
    one, two, both = os.urandom(40_000), os.urandom(60_000), os.urandom(100_000)
    first = here.push(of_session(here.snapshot({"one": one, "both": both}), "a"))
    second = here.push(of_session(here.snapshot({"two": two, "both": both}), "b"))
    found = counted(here)
    assert found.snapshots[first.id].unique == about(40_000)
    assert found.snapshots[second.id].unique == about(60_000)
    assert found.snapshots[first.id].shared == about(100_000)
    assert found.snapshots[first.id].logical == 140_000 + len(b"template")
    assert found.sessions["a"].unique == about(40_000)
    assert found.sessions["b"].shared == about(100_000)
    assert found.tenants[TENANT].unique == about(200_000)
    assert found.total.snapshots == 2
    assert found.total.dead < 1000


def test_what_snapshots_of_one_session_share_is_the_sessions_own(here):
    base, more = {"base": os.urandom(50_000)}, {"more": os.urandom(20_000)}
    first = here.push(of_session(here.snapshot(base), "a"))
    second = here.push(of_session(here.snapshot(base, more), "a"))
    found = counted(here)
    assert found.snapshots[first.id].unique == 0
    assert found.snapshots[first.id].shared == about(50_000)
    assert found.snapshots[second.id].unique == about(20_000)
    assert found.sessions["a"].unique == about(70_000)


def test_deleting_frees_what_was_counted_as_unique(here):
    both = os.urandom(100_000)
    here.publish({"one": os.urandom(400_000), "both": both})
    gone = here.publish(
        {"big": os.urandom(3 << 20), "both": both}, memory={"m": os.urandom(70_000)}
    )
    unique = counted(here).snapshots[gone.id].unique
    assert unique == about((3 << 20) + 70_000)
    here.delete(gone)
    assert counted(here).total.dead == about(unique)
    before = sum(info.size for info in here.backend.list(f"{TENANT}/packs/"))
    here.collect(repack_below=1.0)
    after = sum(info.size for info in here.backend.list(f"{TENANT}/packs/"))
    assert before - after == about(unique)
    assert counted(here).total.dead < 1000


def test_a_second_copy_of_a_chunk_is_dead(here):
    data = os.urandom(50_000)
    stale = here.fresh()
    assert len(stale.domain().index) == 0
    here.publish({"f": data})
    stale.publish({"f": data, "g": b"another layer"})
    assert counted(here).total.dead == about(50_000)


def test_ratios(here):
    text = b"the same line again and again\n" * 2000
    for number in range(4):
        here.publish({"f": text, "n": str(number).encode()})
    total = counted(here).total
    assert total.deduplication > 3
    assert total.compression > 5
    assert total.packs == len(here.keys("/packs/"))
    assert total.pack_bytes == sum(
        info.size for info in here.backend.list("") if "/packs/" in info.key
    )


def test_templates_are_shared_between_tenants(here):
    base = {"t": os.urandom(80_000)}
    for tenant in ("ten_1", "ten_2"):
        here.publish({"a": b"a"}, base=base, tenant=tenant)
    found = counted(here)
    for tenant in ("ten_1", "ten_2"):
        assert found.tenants[tenant].shared == about(80_000)
        assert found.tenants[tenant].unique < 3000
    assert found.domains["shared"].used == about(80_000)


def test_an_empty_repository(here):
    found = counted(here)
    assert found.total.pack_bytes == 0
    assert (found.total.deduplication, found.total.compression) == (1.0, 1.0)


def test_what_cannot_be_read_is_named(here):
    here.publish({"a": b"a"})
    [key] = here.keys(f"{TENANT}/layers/")
    here.backend.put(key, b"nonsense")
    with pytest.raises(IntegrityError) as raised:
        counted(here)
    assert raised.value.details["object"] == key
