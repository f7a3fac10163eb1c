"""What is known of E2B's sandboxes without loading what serves them."""

from __future__ import annotations

import msgspec

PREFIX = "sojourn.e2b."
"""Of reserved labels: what E2B wants to know of a sandbox and a session has no place for."""
TEMPLATE = PREFIX + "template"
"""The name it was asked for by; also marks sandboxes made here."""


class Settings(msgspec.Struct, frozen=True):
    """How E2B's clients are served: whether a sandbox that says nothing of the internet has it."""

    internet: bool = False
