"""Finding tools and templates: what is given out exists and fits, or the cure is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from sojourn.errors import HostUnfit, UnknownTemplate
from sojourn.node import tools
from sojourn.node.setup import checked
from sojourn.node.setup.publish import point
from sojourn.node.setup.runsc import publish_package
from sojourn.node.setup.supervisor import ensure_supervisor, is_static
from sojourn.node.setup.template import ensure_debian_template


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SOJOURN_RUNSC", "SOJOURN_SUPERVISOR", "SOJOURN_TEMPLATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def fake_runsc(path: Path, says: str, code: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    path.chmod(0o755)
    return path


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path))
    assert tools.home() == tmp_path
    monkeypatch.delenv("SOJOURN_HOME")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert tools.home() == Path("/var/lib/sojourn")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert tools.home() == Path("/data/sojourn")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert tools.home() == Path("/home/someone/.local/share/sojourn")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("runsc version release-20240729.0\nspec: 1.1.0\n", (20240729, 0)),
        ("runsc version 0.0~20240729.0\nspec: 1.2.0\n", (20240729, 0)),
        ("0.0~20240729.0-4+b7", (20240729, 0)),
        ("release-20251110.12", (20251110, 12)),
        ("runsc version 20230101-3", (20230101, 0)),
        ("runsc version VERSION_MISSING", None),
        ("120240729", None),
        ("", None),
    ],
)
def test_versions(text: str, version: tuple[int, int] | None) -> None:
    assert tools.parse_runsc_version(text) == version


def test_versions_compare_as_numbers() -> None:
    versions = [
        tools.parse_runsc_version(f"release-{text}") for text in ("20250101.10", "20250101.9")
    ]
    assert versions[0] is not None and versions[1] is not None
    assert versions[0] > versions[1]


def test_a_missing_runsc_names_the_cure() -> None:
    with pytest.raises(HostUnfit) as caught:
        tools.runsc_path()
    assert "sojourn setup" in caught.value.next_step


def test_the_newest_runsc_is_used(own_home: Path) -> None:
    for version in ("0.0~20240729.0-4+b7", "0.0~20251110.2-1", "0.0~20251110.10-1"):
        fake_runsc(own_home / "tools" / f"runsc-{version}" / "runsc", f"runsc version {version}")
    assert tools.runsc_path().parent.name == "runsc-0.0~20251110.10-1"


@pytest.mark.parametrize(
    ("says", "code", "why"),
    [
        ("runsc version release-20230101.0", 0, "too old"),
        ("hello", 0, "does not answer as runsc"),
        ("runsc version release-20240729.0", 1, "does not answer as runsc"),
    ],
)
def test_a_given_runsc_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, code: int, why: str
) -> None:
    monkeypatch.setenv("SOJOURN_RUNSC", str(fake_runsc(tmp_path / "given", says, code)))
    with pytest.raises(HostUnfit, match=why):
        tools.runsc_path()


def test_a_given_runsc_that_is_gone_or_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOJOURN_RUNSC", str(tmp_path / "gone"))
    with pytest.raises(HostUnfit, match="no runsc at"):
        tools.runsc_path()
    (tmp_path / "text").write_text("text")
    monkeypatch.setenv("SOJOURN_RUNSC", str(tmp_path / "text"))
    with pytest.raises(HostUnfit, match="does not run"):
        tools.runsc_path()


def test_a_replaced_runsc_is_asked_again(tmp_path: Path) -> None:
    path = fake_runsc(tmp_path / "runsc", "runsc version release-20240729.0")
    assert tools.runsc_version(path) == (20240729, 0)
    fake_runsc(path, "runsc version release-20251110.13")
    assert tools.runsc_version(path) == (20251110, 13)


def test_a_package_of_an_old_runsc_is_not_published(tmp_path: Path, own_home: Path) -> None:
    tree = tmp_path / "tree"
    fake_runsc(tree / "usr/bin/runsc", "runsc version release-20220101.0")
    copyright_file = tree / "usr/share/doc/runsc/copyright"
    copyright_file.parent.mkdir(parents=True)
    copyright_file.write_text("terms")
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(
        "Package: runsc\nVersion: 0.0~20240729.0-1\nArchitecture: all\n"
        "Maintainer: x <x@example.org>\nDescription: x\n"
    )
    package = tmp_path / "runsc_1_all.deb"
    from sojourn.node.setup.commands import run_command

    run_command(["dpkg-deb", "--build", str(tree), str(package)], what="package")
    with pytest.raises(HostUnfit, match="too old"):
        publish_package(package, lambda line: None)
    assert tools.installed_runscs() == []
    fake_runsc(tree / "usr/bin/runsc", "runsc version release-20240729.0")
    run_command(["dpkg-deb", "--build", str(tree), str(package)], what="package")
    published = publish_package(package, lambda line: None)
    assert tools.installed_runscs() == [published]
    assert (published.parent / "copyright").read_text() == "terms"


# -- templates ------------------------------------------------------------------------------


def test_templates(own_home: Path) -> None:
    with pytest.raises(HostUnfit) as caught:
        tools.template_root("debian")
    assert "sojourn setup" in caught.value.next_step
    directory = own_home / "templates" / "debian"
    for version in ("one", "two"):
        (directory / version / "root").mkdir(parents=True)
    (directory / ".one.lock").touch()
    assert tools.template_names() == []  # nothing is in use before `current` says so
    point(directory / "current", "one")
    first = tools.template_root("debian")
    assert first == directory / "one" / "root"
    point(directory / "current", "two")
    assert tools.template_root("debian") == directory / "two" / "root"
    assert first.is_dir()
    assert tools.template_names() == ["debian"]
    with pytest.raises(UnknownTemplate):
        tools.template_root("other")


@pytest.mark.parametrize("name", ["", "..", "../templates/debian", "debian/one", "/", "A", "a\0b"])
def test_a_template_name_is_no_path(own_home: Path, name: str) -> None:
    (own_home / "templates" / "debian" / "one" / "root").mkdir(parents=True)
    point(own_home / "templates" / "debian" / "current", "one")
    with pytest.raises(UnknownTemplate):
        tools.template_root(name)


def test_a_template_directory_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "own" / "root").mkdir(parents=True)
    monkeypatch.setenv("SOJOURN_TEMPLATE_DIR", str(tmp_path / "mine"))
    assert tools.template_root("own") == tmp_path / "mine" / "own" / "root"


def test_only_root_builds_a_template(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(HostUnfit, match="needs root"):
        ensure_debian_template(lambda line: None)
    assert not own_home.exists()


# -- supervisor -----------------------------------------------------------------------------

MAKEFILE = "BUILD ?= build\n$(BUILD)/sojourn-supervisor: main.c\n\t$(CC) {flags} -o $@ $<\n"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "supervisor"
    directory.mkdir()
    (directory / "Makefile").write_text(MAKEFILE.format(flags="-static"))
    (directory / "main.c").write_text("int main(void) { return 7; }\n")
    monkeypatch.setattr(tools, "supervisor_sources", lambda: directory)
    return directory


def test_the_supervisor_is_that_of_the_present_sources(sources: Path) -> None:
    with pytest.raises(HostUnfit, match="not built from the present sources"):
        tools.supervisor_path()
    built = ensure_supervisor(lambda line: None)
    assert is_static(built)
    assert [path.name for path in built.parent.iterdir()] == ["sojourn-supervisor"]
    assert not (sources / "build").exists()
    (sources / "main.c").write_text("int main(void) { return 8; }\n")
    with pytest.raises(HostUnfit):
        tools.supervisor_path()
    assert ensure_supervisor(lambda line: None) != built
    assert built.is_file()


def test_the_digest_sees_names_and_contents_of_sources_only(sources: Path) -> None:
    before = tools.supervisor_digest(sources)
    (sources / "notes.txt").write_text("x")
    (sources / "build").mkdir()
    (sources / "build" / "generated.c").write_text("x")
    assert tools.supervisor_digest(sources) == before
    (sources / "main.c").rename(sources / "other.c")
    assert tools.supervisor_digest(sources) != before


def test_a_supervisor_that_does_not_compile(sources: Path) -> None:
    (sources / "main.c").write_text("int main(void) { return broken; }\n")
    with pytest.raises(HostUnfit, match="broken") as caught:
        ensure_supervisor(lambda line: None)
    assert "libc6-dev" in caught.value.next_step
    assert list(tools.tools_directory().glob("supervisor-*")) == []


def test_a_supervisor_with_shared_libraries_is_refused(sources: Path) -> None:
    (sources / "Makefile").write_text(MAKEFILE.format(flags=""))
    with pytest.raises(HostUnfit, match="shared libraries"):
        ensure_supervisor(lambda line: None)


def test_sources_that_change_during_the_build_are_not_taken_for_what_was_built(
    sources: Path,
) -> None:
    makefile = MAKEFILE.format(flags="-static") + "\techo >> main.c\n"
    (sources / "Makefile").write_text(makefile)
    with pytest.raises(HostUnfit, match="changed while it was built"):
        ensure_supervisor(lambda line: None)
    assert list(tools.tools_directory().glob("supervisor-*")) == []


def test_a_given_supervisor_has_to_be_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOJOURN_SUPERVISOR", str(tmp_path / "gone"))
    with pytest.raises(HostUnfit, match="not a program"):
        tools.supervisor_path()


# -- what has passed ------------------------------------------------------------------------


def test_a_passed_check_holds_until_something_changes(tmp_path: Path, own_home: Path) -> None:
    own_home.mkdir()
    paths = {
        "runsc": str(fake_runsc(tmp_path / "runsc", "x")),
        "template": "/t/1",
    }
    now = checked.Passed.of("6.1", paths)
    assert not checked.holds(now)
    checked.note(now)
    assert checked.holds(now)
    assert not checked.holds(checked.Passed.of("6.2", paths))
    assert not checked.holds(checked.Passed.of("6.1", paths | {"template": "/t/2"}))
    (own_home / "checked.json").write_text('{"kernel": "6.')
    assert not checked.holds(now)
