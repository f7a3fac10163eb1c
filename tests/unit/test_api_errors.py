"""The documented errors are the real ones, and their facts keep to the rules."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sojourn.errors import SojournError, all_errors, from_body, to_body
from sojourn.server.error_list import BEGIN, END, error_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_document_is_current() -> None:
    text = DOCUMENT.read_text()
    documented = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert documented == error_table()


def test_codes_statuses_and_exit_codes() -> None:
    for code, kind in all_errors().items():
        assert code == kind.code and code.replace("_", "").isalpha()
        assert 400 <= kind.status < 600
        assert 100 <= kind.exit_code <= 125
        assert kind.__doc__ and kind.default_next_step


def test_an_unknown_code_is_kept() -> None:
    body = to_body(SojournError("from a newer server", a=1))

    error = from_body(msgspec.structs.replace(body, code="not_yet_known"))
    assert type(error) is SojournError and error.details == {"a": 1, "remote_code": "not_yet_known"}
