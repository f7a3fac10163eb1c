"""What E2B's interfaces say to a server in front: only what was not begun is asked elsewhere."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import pytest

from sojourn.errors import CapacityExhausted, to_body
from sojourn.server.base import Principal
from sojourn.server.e2b import app
from sojourn.server.e2b.sandboxes import Sandboxes

WHO = Principal("ten", "test", "tenant")


def test_a_failure_that_is_on_record_is_not_asked_for_elsewhere() -> None:
    met = CapacityExhausted("full")
    assert app._not_begun(met)
    failed: Any = types.SimpleNamespace(id="opr_1", state="failed", error=to_body(met))
    sandboxes: Any = Sandboxes.__new__(Sandboxes)
    with pytest.raises(CapacityExhausted) as told:
        asyncio.run(sandboxes.finish(WHO, failed))
    assert told.value.details["operation"] == "opr_1"
    assert not app._not_begun(told.value)
