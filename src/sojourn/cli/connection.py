"""The command line's client: by SOJOURN_URL and SOJOURN_TOKEN, else the local server's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sojourn.client.sync_client import Sojourn
    from sojourn.client.sync_session import Session


def connect() -> Sojourn:
    """A client. Only the blocking one is loaded, which keeps start-up quick."""
    from sojourn.client.sync_client import Sojourn

    return Sojourn()


def session(ref: str) -> Session:
    """A session by id or name. Raises SessionNotFound."""
    return connect().sessions.get(ref)
