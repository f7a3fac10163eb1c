"""Where a local server keeps its data and tells clients how to reach it.

Guarantee: the server and every client on the same host, started by the same user with the same
environment, agree on these places without asking each other. The server writes `server.json` and
`token` there; nothing here touches the disk.
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Sojourn's own directory: SOJOURN_HOME, else the place fit for this user."""
    given = os.environ.get("SOJOURN_HOME")
    if given:
        return Path(given).absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/sojourn")
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "sojourn"


def data_directory() -> Path:
    """The server's data directory: SOJOURN_DATA, else `data` in Sojourn's own directory."""
    given = os.environ.get("SOJOURN_DATA")
    return Path(given).absolute() if given else home() / "data"


def server_file(data: Path) -> Path:
    """The file in which a running server tells its address: JSON with `url` and `pid`."""
    return data / "server.json"


def token_file(data: Path) -> Path:
    """The file with the token of the local operator."""
    return data / "token"
