"""`python -m sojourn.repository.archive_worker`: writes one archive in a process of its own.

Guarantee: as with `worker`, hashing and compressing never hold up the process that serves sessions,
and the process ends when its standard input does, so none outlives the server that started it. The
archive goes to a descriptor that was handed down; the server removes what is not finished.

Frames are those of `serving`: one `Job` in, one answer with `Written` out.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from sojourn.model.snapshots import Snapshot
from sojourn.repository.archives import Written, write_archive
from sojourn.repository.copies import StoredCopies
from sojourn.repository.serving import answered, begin, reply
from sojourn.repository.session_records import SessionRecord

_NICE = 5


class Job(msgspec.Struct, frozen=True):
    """An archive to write to `descriptor` from the store at `store`."""

    descriptor: int
    store: str
    record: SessionRecord
    snapshots: list[Snapshot]
    secret: bytes | None

    def __repr__(self) -> str:
        return f"Job(record={self.record.session.id!r}, encrypted={self.secret is not None})"


def _write(frame: bytes) -> Written:
    job = msgspec.msgpack.decode(frame, type=Job)
    copies = StoredCopies(Path(job.store))
    return write_archive(job.descriptor, job.record, job.snapshots, copies, job.secret)


def main() -> None:
    """Write one archive and end."""
    asked = begin(_NICE, logging.WARNING)
    frame = asked.get()
    reply(answered("exporting", lambda: _write(frame)))
    os._exit(0)  # the other thread still reads, and would be in the way of an orderly end


if __name__ == "__main__":
    main()
