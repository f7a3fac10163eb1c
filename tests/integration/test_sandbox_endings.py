"""A sandbox that ends as soon as it was started is noticed at once, and nobody waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sojourn.errors import ResumeFailed
from sojourn.node import tools
from support.servers import ServerProcess

pytestmark = pytest.mark.privileged


def test_memory_whose_first_process_dies_is_told_and_its_files_go_on(tmp_path: Path) -> None:
    ours, other = tmp_path / "supervisor", tmp_path / "other"
    program = tools.supervisor_path().read_bytes()
    ours.write_bytes(program)
    other.write_bytes(program + b"\0")
    for one in (ours, other):
        one.chmod(0o755)
    server = ServerProcess(tmp_path / "data")
    client = server.start(SOJOURN_SUPERVISOR=str(ours))
    try:
        session = client.sessions.create(policy={"auto_snapshot": "off"})
        session.files.write("/root/kept", b"kept")
        session.suspend()
        head = session.refresh().info.head

        # The memory's own program is nothing any more; the one that starts sandboxes is another.
        client = server.restart(SOJOURN_SUPERVISOR=str(other))
        session = client.sessions.get(session.id)
        (copy,) = (tmp_path / "data/gvisor/supervisors").iterdir()
        copy.unlink()
        copy.write_bytes(bytes(len(program)))
        copy.chmod(0o755)
        with pytest.raises(ResumeFailed, match="ended as soon as it had started") as caught:
            session.resume()
        assert "--files-only" in str(caught.value.next_step)
        assert session.refresh().info.head == head

        session.resume(memory=False)
        assert session.files.read("/root/kept") == b"kept"
        with pytest.raises(ResumeFailed):
            session.rollback(head)  # the memory is still there to be tried
    finally:
        server.remove(SOJOURN_SUPERVISOR=str(other))
