"""An import leaves room on the node's disk for everybody else."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import namedtuple
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sojourn.errors import StorageFull
from sojourn.server import imports

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("total", "left"), [(1 << 30, (1 << 30) // 50), (1 << 40, 256 << 20)], ids=["small", "large"]
)
def test_whoever_sends_without_end_is_refused_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, left: int
) -> None:
    sent = 0

    def usage(path: Path) -> Usage:
        # Eight pieces more fit than what is to stay free.
        return Usage(total, 0, left + 8 * imports.PIECE - file.tell())

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            yield bytes(imports.PIECE)
            sent += 1

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with tempfile.TemporaryFile(dir=tmp_path, buffering=0) as file:
        with pytest.raises(StorageFull):
            asyncio.run(imports.receive(file, endless(), tmp_path))
        assert file.tell() == 8 * imports.PIECE
    assert sent == 8
