"""The lease file: what counts of it, whatever was written, broken off or left from before."""

from __future__ import annotations

from pathlib import Path

import pytest

from sojourn.errors import HostUnfit, StorageFull
from sojourn.wire import lease_file
from sojourn.wire.lease_file import SIZE, LeaseFile, LeaseWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lease"


def test_the_newest_deadline_counts_also_when_it_is_nearer(path: Path) -> None:
    writer = LeaseWriter(path)
    reader = LeaseFile(path)
    assert reader.deadline() == 0
    for deadline in (10, 30, 20, 0, 2**63):
        writer.write(deadline)
        assert reader.deadline() == deadline
        assert LeaseFile(path).deadline() == deadline
    assert path.stat().st_size == SIZE


def test_another_writer_keeps_what_holds(path: Path) -> None:
    first = LeaseWriter(path)
    first.write(41)
    first.write(42)
    first.close()
    second = LeaseWriter(path)
    assert second.deadline() == 42
    second.write(7)
    assert LeaseFile(path).deadline() == 7


def test_a_write_that_broke_off_anywhere_leaves_the_one_before(path: Path) -> None:
    writer = LeaseWriter(path)
    writer.write(1000)
    before = path.read_bytes()
    writer.write(2000)
    after = path.read_bytes()
    changed = [at for at in range(SIZE) if before[at] != after[at]]
    seen = set()
    for end in range(changed[0], changed[-1] + 1):
        path.write_bytes(after[:end] + before[end:])
        seen.add(LeaseFile(path).deadline())
    assert seen == {1000}
    for at in range(16, SIZE):  # any byte of a record
        path.write_bytes(after[:at] + bytes([after[at] ^ 1]) + after[at + 1 :])
        assert LeaseFile(path).deadline() in (1000, 2000)


def test_a_deadline_of_an_earlier_boot_is_past(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LeaseWriter(path).write(2**62)
    assert LeaseFile(path).deadline() == 2**62
    other = path.with_name("boot")
    other.write_text("another boot\n")
    monkeypatch.setattr(lease_file, "_BOOT_ID", other)
    assert LeaseFile(path).deadline() == 0
    writer = LeaseWriter(path)
    assert writer.deadline() == 0
    writer.write(5)
    assert LeaseFile(path).deadline() == 5


@pytest.mark.parametrize("content", [b"", b"x", bytes(SIZE), b"\xff" * SIZE, b"y" * 500])
def test_what_is_no_lease_file_holds_nothing_and_is_written_over(
    path: Path, content: bytes
) -> None:
    path.write_bytes(content)
    writer = LeaseWriter(path)
    assert writer.deadline() == 0
    writer.write(9)
    assert LeaseFile(path).deadline() == 9


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageFull):
        LeaseWriter(Path("/dev/full"))
    with pytest.raises(HostUnfit):
        LeaseWriter(tmp_path / "absent" / "lease")
