"""Set-up on a host that has nothing of it yet, and what the template it builds can do."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.node import mounts, tools

SOJOURN = [sys.executable, "-c", "from sojourn.cli.main import main; main()"]


def environment(home: Path) -> dict[str, str]:
    given = {"SOJOURN_RUNSC", "SOJOURN_SUPERVISOR", "SOJOURN_TEMPLATE_DIR", "SOJOURN_HOME"}
    kept = {name: value for name, value in os.environ.items() if name not in given}
    return kept | {"SOJOURN_HOME": str(home)}


@pytest.mark.slow
@pytest.mark.privileged
@pytest.mark.timeout(600)
def test_two_set_ups_at_once_then_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    runs = [
        subprocess.Popen(
            [*SOJOURN, "setup", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(home),
        )
        for _ in range(2)
    ]
    outputs = [run.communicate(timeout=500) for run in runs]
    for run, (_, progress) in zip(runs, outputs, strict=True):
        assert run.returncode == 0, progress
    results = [json.loads(output) for output, _ in outputs]
    assert results[0]["healthy"] and results[1]["healthy"]
    for what in ("runsc", "supervisor", "template"):
        assert results[0][what] == results[1][what]
        assert Path(results[0][what]).is_relative_to(home)
    checks = {check["name"]: check["state"] for check in results[0]["checks"]}
    assert checks["sandbox"] == "ok"
    # One of the two built the template, and nothing half-done is left of either.
    built = [progress for _, progress in outputs if "template: building" in progress]
    assert len(built) == 1
    for pattern in (".staging-*", ".apt-*", ".smoke-*"):
        assert list(home.rglob(pattern)) == []
    assert mounts.mounts_under(home) == []
    # Its set-uid programs are out of reach for the host's users.
    assert stat.S_IMODE((home / "templates").stat().st_mode) == 0o700
    assert_tree_is_neutral(Path(results[0]["template"]) / "root")

    before = {path: path.stat().st_ino for path in home.glob("*/*/*")}
    again = subprocess.run(
        [*SOJOURN, "setup", "--if-needed"],
        capture_output=True,
        text=True,
        env=environment(home),
        timeout=100,
    )
    assert again.returncode == 0, again.stderr
    assert len(again.stdout.splitlines()) == 1
    assert {path: path.stat().st_ino for path in home.glob("*/*/*")} == before


def assert_tree_is_neutral(root: Path) -> None:
    host = os.uname().nodename
    assert (root / "etc/hostname").read_text() == "sojourn\n"
    assert host not in (root / "etc/hosts").read_text().split()
    assert (root / "etc/resolv.conf").read_bytes() == b""
    assert (root / "etc/machine-id").read_bytes() == b""
    assert list((root / "dev").iterdir()) == []
    assert list((root / "proc").iterdir()) == []
    assert list((root / "sys").iterdir()) == []
    home = (root / "home/agent").stat()
    assert (home.st_uid, home.st_gid, stat.S_ISDIR(home.st_mode)) == (1000, 1000, True)


# -- the template in use --------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A writable view of the template."""
    for name in ("upper", "work", "tree"):
        (tmp_path / name).mkdir()
    merged = tmp_path / "tree"
    root = tools.template_root("debian")
    mounts.mount_overlay([root], tmp_path / "upper", tmp_path / "work", merged)
    try:
        yield merged
    finally:
        mounts.unmount(merged)


def inside(tree: Path, script: str) -> str:
    """Run a script as the template's user, without a network, in namespaces that go with it."""
    enter = (
        'mount -t proc proc "$1/proc"; mknod -m 666 "$1/dev/null" c 1 3; '
        'mknod -m 666 "$1/dev/urandom" c 1 9; '
        'exec chroot --userspec=agent:agent "$1" /usr/bin/env -i HOME=/home/agent '
        'PATH=/usr/bin:/bin LANG=C.UTF-8 /bin/bash -euc "$2"'
    )
    kinds = ("--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child")
    done = subprocess.run(
        ["unshare", *kinds, "sh", "-ec", enter, "sh", str(tree), script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.privileged
def test_the_template_serves_an_agent(tree: Path) -> None:
    with zipfile.ZipFile(tree / "tmp/tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "answer = 42\n")
        info = "tiny-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    output = inside(
        tree,
        """
        id -un; id -u; pwd >/dev/null; cd ~
        python3 -m venv env
        env/bin/pip install --quiet --no-index --find-links /tmp tiny
        env/bin/python -c 'import tiny; print(tiny.answer)'
        git init --quiet repo && cd repo
        echo x >file && git add file
        git -c user.name=a -c user.email=a@example.org commit --quiet -m first
        git rev-list --count HEAD
        sqlite3 /tmp/db 'create table t(n); insert into t values(5); select n from t;'
        python3 -c 'print("gr\\u00fc\\u00df")'
        for tool in curl less ps tar gzip sed awk; do command -v $tool >/dev/null; done
        """,
    )
    assert output.split() == ["agent", "1000", "42", "1", "5", "grüß"]


@pytest.mark.privileged
def test_the_template_knows_its_own_packages() -> None:
    from sojourn.node.setup.template import check_tree, read_manifest

    manifest = read_manifest("debian")
    assert {"python3", "git", "bash"} <= manifest.packages.keys()
    assert (manifest.user, manifest.uid, manifest.working_directory) == (
        "agent",
        1000,
        "/home/agent",
    )
    check_tree(tools.template_root("debian"))


@pytest.mark.privileged
def test_an_unsound_tree_is_refused(tmp_path: Path) -> None:
    from sojourn.errors import HostUnfit
    from sojourn.node.setup.template import check_tree

    root = tools.template_root("debian")
    tree = tmp_path / "tree"
    for name in ("usr/bin", "etc", "dev", "home"):
        (tree / name).mkdir(parents=True)
    shutil.copy(root / "etc/passwd", tree / "etc/passwd")
    (tree / "etc/resolv.conf").write_text("nameserver 192.0.2.1\n")
    (tree / "dev/null").touch()
    with pytest.raises(HostUnfit) as caught:
        check_tree(tree)
    for word in ("usr/bin/python3", "resolv.conf is not empty", "dev is not empty"):
        assert word in caught.value.message
