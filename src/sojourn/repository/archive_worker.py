"""`python -m sojourn.repository.archive_worker`: writes one archive in a process of its own.

Guarantee: as with `worker`, hashing and compressing never hold up the process that serves sessions,
and the process ends when its standard input does, so none outlives the server that started it. The
archive goes to a descriptor that was handed down; the server removes what is not finished.

Frames are those of `worker`: one `Job` in, one `[Written, null]` or `[null, error body]` out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from pathlib import Path

import msgspec

from sojourn.errors import SojournError, to_body
from sojourn.model.snapshots import Snapshot
from sojourn.repository.archives import write_archive
from sojourn.repository.copies import StoredCopies
from sojourn.repository.session_records import SessionRecord
from sojourn.repository.worker import encode_frame, end_with_input, typed

log = logging.getLogger(__name__)

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


def _answer(frame: bytes) -> bytes:
    try:
        job = msgspec.msgpack.decode(frame, type=Job)
        copies = StoredCopies(Path(job.store))
        written = write_archive(job.descriptor, job.record, job.snapshots, copies, job.secret)
        return encode_frame((written, None))
    except SojournError as error:
        return encode_frame((None, to_body(error)))
    except OSError as error:
        return encode_frame((None, to_body(typed(error))))
    except Exception as error:
        # A fault here is told like any other failure.
        log.exception("a fault while exporting")
        return encode_frame((None, to_body(SojournError(f"a fault while exporting: {error!r}"))))


def main() -> None:
    """Write one archive and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when its worker ends
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=end_with_input, args=(sys.stdin.buffer, asked.put), daemon=True).start()
    answer = _answer(asked.get())
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    os._exit(0)  # the other thread still reads, and would be in the way of an orderly end


if __name__ == "__main__":
    main()
