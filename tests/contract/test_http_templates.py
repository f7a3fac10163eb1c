"""Templates over HTTP and by the command line: what is sent, what is told, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sojourn.cli.main import run
from sojourn.errors import CaptureRefused, ImageInvalid, TemplateNotFound
from support.http_rig import HttpRig
from support.images import MadeImage, layer, member

pytest_plugins = ["support.http_fixtures"]


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return MadeImage([layer([member("a", b"a")])]).layout(tmp_path / "layout")


def test_an_image_is_sent_and_versions_are_told(api: Any, layout: Path) -> None:
    told: list[tuple[int, int | None]] = []
    made = api.templates.build(
        "sent", f"oci:{layout}", on_progress=lambda done, total: told.append((done, total))
    )
    assert made.version == 1 and made.source == "oci:layout"
    assert told[-1][0] == told[-1][1] == made.bytes
    assert api.templates.build("sent", f"oci:{layout}").version == 2
    assert api.templates.get("sent@1").version == 1
    assert {one.name for one in api.templates.list()} >= {"debian"}
    for version in ("sent@1", "sent@2"):
        api.templates.remove(version)
    with pytest.raises(TemplateNotFound):
        api.templates.get("sent")


def test_what_the_server_refuses_is_told(api: Any, rig: HttpRig, work: Any, layout: Path) -> None:
    rig.service.fail_next("build_template", ImageInvalid("damaged"))
    with pytest.raises(ImageInvalid, match="damaged"):
        api.templates.build("bad", f"oci:{layout}")
    rig.service.fail_next("make_template", CaptureRefused("it was granted secrets"))
    with pytest.raises(CaptureRefused, match="secrets"):
        work.to_template("bad")
    made = work.to_template("good", memory=False)
    assert made.source == f"session {work.id}"
    api.templates.remove("good")


def test_the_command_line(
    rig: HttpRig,
    work: Any,
    layout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SOJOURN_URL", rig.url)
    monkeypatch.setenv("SOJOURN_TOKEN", "token-a")

    def said(*words: str) -> tuple[int, str]:
        code = run(("template", *words))
        told = capsys.readouterr()
        return code, told.out + told.err

    assert said("build", "typed", f"oci:{layout}") == (0, "typed@1\n")
    code, out = said("build", "typed", "--from-session", work.id, "--cold", "--json")
    assert code == 0 and json.loads(out)["version"] == 2
    code, out = said("show", "typed@1")
    assert code == 0 and "typed@1" in out and "oci:layout" in out
    assert said("rm", "typed@1")[0] == said("rm", "typed@2")[0] == 0
    assert said("show", "typed")[0] == TemplateNotFound.exit_code
    for wrong in (
        ("build", "x"),
        ("build", "x", "oci:y", "--from-session", work.id),
        ("build", "x", "oci:y", "--cold"),
        ("build", "x", "short:name"),
        ("build", "x", "--file", "none", "--arg", "novalue"),
    ):
        assert said(*wrong)[0] == 101, wrong
