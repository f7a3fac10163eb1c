"""A long chain of layers is merged while its session is put away, and shows the same as before."""

from __future__ import annotations

import pytest

from sojourn.server.snapshots import LONG_CHAIN
from sojourn.store.local import LocalStore
from support.servers import ServerProcess, eventually

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]


def test_a_long_chain_is_merged_while_the_session_is_away(server: ServerProcess) -> None:
    session = server.client().sessions.create(policy={"auto_snapshot": "off"})
    session.run_code("kept = 41")
    session.exec("mkdir -p /srv/d && echo old > /srv/gone && ln -s d /srv/link")
    for number in range(LONG_CHAIN + 1):
        # Every placement adds a layer.
        session.exec(f"echo {number} >> /srv/log; echo {number} > /srv/d/{number}")
        session.suspend()
    session.exec("rm /srv/gone /srv/d/3; echo last > /srv/d/4")
    session.suspend()
    eventually(lambda: "squash" in [event.kind for event in session.events()])
    assert session.refresh().state == "suspended"
    session.resume()
    assert session.files.read("/srv/log").decode().split() == [
        str(number) for number in range(LONG_CHAIN + 1)
    ]
    assert session.exec("ls /srv; ls /srv/link | wc -l; cat /srv/link/4").text == (
        f"d\nlink\nlog\n{LONG_CHAIN}\nlast\n"
    )
    assert session.run_code("kept + 1").text == "42"
    session.suspend()
    head = session.refresh().head
    server.stop()
    snapshot = LocalStore(server.data / "store").read_snapshot(head or "")
    assert len(snapshot.layers) <= 3
