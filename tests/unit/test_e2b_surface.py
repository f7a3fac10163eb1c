"""Every public method of E2B's SDKs is in the documentation, as supported or refused."""

from __future__ import annotations

from pathlib import Path

from support import e2b_surface

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "e2b.md"
BEGIN = "<!-- methods: written from tests/support/e2b_surface.py -->\n"
END = "<!-- /methods -->"


def test_every_method_of_the_installed_sdks_is_known() -> None:
    found = e2b_surface.found()
    known = {name: set(methods) for name, methods in e2b_surface.KNOWN.items()}
    assert found == known


def test_the_document_says_what_becomes_of_each() -> None:
    text = DOCUMENT.read_text()
    _, _, rest = text.partition(BEGIN)
    said, end, _ = rest.partition(END)
    assert end, "docs/e2b.md has no list of methods"
    assert said.strip() == e2b_surface.table().strip(), e2b_surface.table()
