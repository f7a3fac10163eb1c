"""The lock, the packaging and the command line hold together."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement

from sojourn.cli import main
from sojourn.errors import SessionNotFound
from sojourn.node.setup import host_packages
from sojourn.node.setup.host_packages import NEEDS

TREE = Path(__file__).parents[2]


def locked() -> dict[str, str]:
    text = (TREE / "requirements.lock").read_text()
    return dict(re.findall(r"^([a-z0-9._-]+)==([^ ;\\]+)", text, re.MULTILINE))


def wanted() -> list[Requirement]:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())
    names = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
        *project["build-system"]["requires"],
    ]
    return [Requirement(name) for name in names]


@pytest.mark.parametrize("requirement", wanted(), ids=str)
def test_the_lock_has_what_the_project_wants(requirement: Requirement) -> None:
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    assert name in locked(), "run `make lock`"
    assert requirement.specifier.contains(locked()[name]), "run `make lock`"


def test_every_locked_package_has_hashes() -> None:
    entries = re.split(r"^(?=[a-z0-9])", (TREE / "requirements.lock").read_text(), flags=re.M)[1:]
    assert len(entries) == len(locked())
    assert all("--hash=sha256:" in entry for entry in entries)


def test_no_registry_is_named() -> None:
    for name in ("requirements.lock", "Makefile", "pyproject.toml", "scripts/venv.sh", ".ci/run"):
        text = (TREE / name).read_text()
        assert not re.search(r"https?://|--index-url|--find-links", text), name


def test_every_need_has_a_purpose_and_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(need.purpose for need in NEEDS)
    monkeypatch.setattr(host_packages.shutil, "which", lambda name, path: None)
    monkeypatch.setattr(host_packages, "is_installed", lambda package: False)
    assert host_packages.missing_packages() == list(NEEDS)
    monkeypatch.setattr(host_packages.shutil, "which", lambda name, path: "/usr/bin/" + name)
    monkeypatch.setattr(host_packages, "is_installed", lambda package: True)
    assert host_packages.missing_packages() == []


def test_installed_packages_are_known_by_dpkg() -> None:
    assert host_packages.is_installed("dpkg")
    assert not host_packages.is_installed("no-such-package-as-this")


# -- the command ----------------------------------------------------------------------------


def sojourn(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from sojourn.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )


def test_every_command_loads() -> None:
    context = click.Context(main.cli)
    for name in main.COMMANDS:
        command = main.cli.get_command(context, name)
        assert command is not None and command.help, name


def test_start_up_imports_little() -> None:
    code = (
        "import sys, sojourn.cli.main;"
        "print([m for m in sys.modules if m.split('.')[0] in"
        " {'rich', 'litestar', 'uvicorn', 'httpcore', 'asyncio', 'sqlite3'}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_usage_errors_have_a_code_of_their_own() -> None:
    done = sojourn("no-such-command")
    assert done.returncode == main.EXIT_USAGE
    assert "no-such-command" in done.stderr
    done = sojourn("doctor", "--no-such-option", "--json")
    assert done.returncode == main.EXIT_USAGE
    assert '"invalid_request"' in done.stderr


def fails(error: Exception) -> click.Command:
    def raise_it(json: bool) -> None:
        raise error

    return click.Command(
        "fails", callback=raise_it, params=[click.Option(["--json"], is_flag=True)]
    )


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (SessionNotFound("no session x"), 103, ["no session x", "session_not_found", "session ls"]),
        (ValueError("surprise"), 100, ["ValueError: surprise", "Traceback"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
    ],
)
def test_failures_end_with_their_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    words: list[str],
) -> None:
    monkeypatch.setattr(
        main.cli, "get_command", lambda context, name: fails(error) if name == "fails" else None
    )
    assert main.run(["fails"]) == code
    told = capsys.readouterr().err
    for word in words:
        assert word in told


def test_a_command_may_give_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    command = click.Command("seven", callback=lambda: 7)
    monkeypatch.setattr(main.cli, "get_command", lambda context, name: command)
    assert main.run(["seven"]) == 7


def test_json_of_a_command_inside_is_not_ours() -> None:
    assert main.wants_json(["session", "ls", "--json"])
    assert not main.wants_json(["exec", "s", "--", "tool", "--json"])


def test_a_reader_that_leaves_is_no_error() -> None:
    code = "import sys; from sojourn.cli.main import run; sys.exit(run(['doctor', '--fast']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert told == ""
