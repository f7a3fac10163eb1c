"""Files that change while they are read are read all the same.

Group G of the cases: a file that a program rewrites all the time is truncated and filled again,
so its size at one look says little about the next.
"""

from __future__ import annotations

from sojourn.client import Session


def test_a_file_rewritten_all_the_time_can_be_read(session: Session) -> None:
    session.files.write("/tmp/busy", b"0")
    writer = session.spawn(
        'i=0; while :; do echo "$i" > /tmp/busy; echo "$i$i$i$i" > /tmp/busy; i=$((i+1)); done'
    )
    lengths = {len(session.files.read("/tmp/busy")) for _ in range(150)}
    writer.kill()
    assert len(lengths) > 1, "nothing was rewritten"
