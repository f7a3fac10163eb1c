"""A copy of the data directory, made as docs/operate.md says, is a server's state elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from support.servers import ServerProcess

OPERATE = Path(__file__).parents[2] / "docs" / "operate.md"


def documented_commands(home: Path, target: Path, archive: Path) -> list[list[str]]:
    """The two tar commands of the page, on other directories."""
    section = OPERATE.read_text().split("\n## Backup\n", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^tar .*$", section, re.MULTILINE)
    assert len(lines) == 2
    names = {"backup.tar": archive, "/var/lib/sojourn": home, "/somewhere": target}
    return [
        [str(names.get(word, word)).replace("'", "") for word in line.split()] for line in lines
    ]


def test_a_copied_data_directory_serves_its_sessions(server: ServerProcess, tmp_path: Path) -> None:
    session = server.client().sessions.create(name="kept")
    session.exec("echo of the first place > note; ln note linked; mkfifo pipe")
    session.run_code("kept = 41")
    session.suspend()
    server.stop()
    target = tmp_path / "somewhere"
    target.mkdir()
    for command in documented_commands(server.data.parent, target, tmp_path / "backup.tar"):
        subprocess.run(command, check=True)
    copy = ServerProcess(target / "data")
    copy.start()
    try:
        # The first place is out of reach, so that nothing can come from it.
        hidden = server.data.rename(tmp_path / "hidden")
        try:
            found = copy.client().sessions.get("kept")
            assert found.verify().ok
            assert found.run_code("kept + 1").text == "42"
            assert found.exec("cat linked; stat -c %h note; test -p pipe").stdout == (
                b"of the first place\n2\n"
            )
        finally:
            hidden.rename(server.data)
    finally:
        copy.remove()
        shutil.rmtree(target)
