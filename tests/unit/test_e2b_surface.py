"""Every public method of E2B's SDKs is in the documentation, as supported or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import e2b_js_surface, e2b_surface, javascript

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "e2b.md"
SURFACES = {"e2b_surface": e2b_surface, "e2b_js_surface": e2b_js_surface}


@pytest.mark.parametrize("name", SURFACES)
def test_every_method_of_the_installed_sdks_is_known(name: str) -> None:
    surface = SURFACES[name]
    if surface is e2b_js_surface and javascript.missing():
        pytest.skip(javascript.missing())
    found = surface.found()
    known = {name: set(methods) for name, methods in surface.KNOWN.items()}
    assert found == known


@pytest.mark.parametrize("name", SURFACES)
def test_the_document_says_what_becomes_of_each(name: str) -> None:
    _, _, rest = DOCUMENT.read_text().partition(
        f"<!-- methods: written from tests/support/{name}.py -->\n"
    )
    said, end, _ = rest.partition("<!-- /methods -->")
    assert end, f"docs/e2b.md has no list of methods of {name}"
    wanted = e2b_surface.table(SURFACES[name].KNOWN)
    assert said.strip() == wanted.strip(), wanted
