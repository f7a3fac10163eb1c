"""The files of `deploy`: of their schemas, and true to the commands and variables there are."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from sojourn.cli.main import cli
from sojourn.node.setup.host_packages import NEEDS
from sojourn.wire.nodes import NodeTokenInfo

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
VERSIONS = ("1.31", "1.34")
_PROGRAM = "/opt/sojourn/bin/sojourn"


def objects() -> list[dict[str, Any]]:
    return [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]


def named(kind: str, name: str) -> dict[str, Any]:
    [found] = [o for o in objects() if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def pods() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, labels and pod of whatever makes pods."""
    for one in objects():
        if one["kind"] in ("Deployment", "DaemonSet"):
            template = one["spec"]["template"]
            yield one["metadata"]["name"], template["metadata"]["labels"], template["spec"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def check_command(words: list[str]) -> None:
    """A command line of ours is one: its command and its options are there."""
    command: click.Command = cli
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"there is no command {name}"
        command = found
    command.make_context("sojourn", list(words), resilient_parsing=True)


# -- Kubernetes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_of_their_schemas(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="make frameworks brings it")
    for one in objects():
        validator.validate(one, version, strict=True)


def test_selectors_find_their_pods() -> None:
    labels = {name: found for name, found, _ in pods()}
    for name, found in labels.items():
        owner = next(o for o in objects() if o["metadata"]["name"] == name and "spec" in o)
        assert owner["spec"]["selector"]["matchLabels"] == found
    for one in objects():
        if one["kind"] == "Service":
            assert one["spec"]["selector"] == labels["sojourn-server"]
        if one["kind"] == "PodDisruptionBudget":
            assert one["spec"]["selector"]["matchLabels"] == labels["sojourn-server"]


def test_ports_that_are_named_are_there() -> None:
    for _, _, pod in pods():
        [container] = pod["containers"]
        there = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            get = container[probe]["httpGet"]
            assert get["port"] in there and get["path"] in ("/health", "/ready")
    [server] = named("Deployment", "sojourn-server")["spec"]["template"]["spec"]["containers"]
    there = {port["name"] for port in server["ports"]}
    for one in objects():
        if one["kind"] == "Service":
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= there


def test_what_pods_refer_to_is_in_the_example() -> None:
    secrets = {
        o["metadata"]["name"]: set(o["stringData"]) for o in objects() if o["kind"] == "Secret"
    }
    maps = {o["metadata"]["name"] for o in objects() if o["kind"] == "ConfigMap"}
    for _, _, pod in pods():
        for container in containers(pod):
            for source in container.get("envFrom", []):
                if "secretRef" in source:
                    assert source["secretRef"]["name"] in secrets
                else:
                    assert source["configMapRef"]["name"] in maps
            for variable in container.get("env", []):
                key = variable.get("valueFrom", {}).get("secretKeyRef")
                assert key is None or key["key"] in secrets[key["name"]]
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted <= {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
    [server] = named("Deployment", "sojourn-server")["spec"]["template"]["spec"]["containers"]
    files = {v["value"] for v in server["env"] if v["name"].endswith("_FILE")}
    assert files == {f"/keys/{name}" for name in secrets["sojourn-keys"]}


def test_servers_have_no_rights_and_nodes_those_of_the_machine() -> None:
    found = {name: pod for name, _, pod in pods()}
    server, node = found["sojourn-server"], found["sojourn-node"]
    assert not any(pod["automountServiceAccountToken"] for pod in found.values())
    assert server["securityContext"]["runAsNonRoot"] is True
    [container] = server["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "hostPID" not in server
    # So that sandboxes outlive the pod: its process numbers, mounts and control groups.
    assert node["hostPID"] is True
    mounts = {mount["name"]: mount for mount in node["containers"][0]["volumeMounts"]}
    assert mounts["sojourn"]["mountPropagation"] == "Bidirectional"
    assert mounts["cgroup"]["mountPath"] == "/sys/fs/cgroup"
    assert named("DaemonSet", "sojourn-node")["spec"]["updateStrategy"] == {"type": "OnDelete"}
    for container in containers(node):
        told = str(container.get("env", [])) + str(container.get("envFrom", []))
        assert ("operator.token" in told) is (container["name"] == "join")


def test_commands_and_variables_of_pods_exist() -> None:
    known = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r'"(SOJOURN_\w+)"', path.read_text())
    }
    for _, _, pod in pods():
        for container in containers(pod):
            if "command" not in container:
                check_command(container["args"])
            for variable in container.get("env", []):
                name = variable["name"]
                assert not name.startswith("SOJOURN_") or name in known, name
    for one in objects():
        if one["kind"] in ("ConfigMap", "Secret"):
            for name in {**one.get("data", {}), **one.get("stringData", {})}:
                assert not name.startswith("SOJOURN_") or name in known, name


def test_a_machine_joins_once(tmp_path: Path) -> None:
    """The program of the pod's `join`, with a command line that tells what it was asked."""
    _, _, pod = next(one for one in pods() if one[0] == "sojourn-node")
    [join] = [one for one in pod["initContainers"] if one["name"] == "join"]
    told = dict.fromkeys(NodeTokenInfo.__struct_fields__, "?")
    told |= {"token": "tok en", "url": "https://server:7071"}
    asked = tmp_path / "asked"
    fake = tmp_path / "sojourn"
    fake.write_text(
        f"""#!{sys.executable}
import json, os, sys
with open({str(asked)!r}, "a") as file:
    print(sys.argv[1:], os.environ.get("SOJOURN_NODE_TOKEN"), file=file)
if sys.argv[1:3] == ["node", "token"]:
    print(json.dumps({told!r}))
"""
    )
    fake.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "SOJOURN_DATA": str(tmp_path / "data"),
        "MACHINE": "worker-1",
    }
    command = [*join["command"], *join["args"]]
    subprocess.run(command, env=environment, check=True)
    first, second = asked.read_text().splitlines()
    assert first == "['node', 'token', '--json'] None"
    words = ["node", "join", "--server", "https://server:7071", "--name", "worker-1"]
    assert second == f"{words} tok en"
    check_command(words)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "node.json").touch()
    subprocess.run(command, env=environment, check=True)
    assert len(asked.read_text().splitlines()) == 2


# -- systemd ------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_are_what_systemd_reads(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    # What it names has to be there.
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(_PROGRAM, "/bin/true"))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True
    )
    told = [line for line in found.stderr.splitlines() if unit.name in line]
    assert (found.returncode, told) == (0, [])


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_run_commands_that_exist(unit: Path) -> None:
    text = unit.read_text()
    lines = re.findall(rf"^ExecStart(?:Pre)?={_PROGRAM} (.+)$", text, re.M)
    assert lines and len(lines) == text.count("ExecStart")
    for line in lines:
        check_command(line.split())
    assert "Restart=always" in text
    if "server" not in unit.name:
        # Sandboxes and the watchdog outlive the unit's own process.
        assert "KillMode=process" in text


# -- the image ----------------------------------------------------------------------------------


def test_the_image_copies_what_is_there_and_sent() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    sent = [
        line.removeprefix("!")
        for line in (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M)
        for source in line.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == one or source.startswith(f"{one}/") for one in sent), source
    project = (ROOT / "pyproject.toml").read_text()
    for needed in re.findall(r'^(?:path|readme) = "([^"]+)"', project, re.M):
        assert needed in copied, needed


def test_the_image_brings_what_set_up_needs() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    last = text.rpartition("--no-install-recommends")[2].partition("&&")[0]
    assert {need.package for need in NEEDS} <= set(last.split())


def test_the_image_has_what_a_server_needs_and_no_more() -> None:
    """Its lock says what `make lock` writes: what the package depends on, and no tools of tests."""
    lock = (DEPLOY / "requirements.lock").read_text()
    locked = set(re.findall(r"^([a-z0-9-]+)(?:\[\w+\])?==", lock, re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["observability"]]
    assert {re.match(r"[\w.-]+", one)[0] for one in needed} <= locked  # type: ignore[index]
    assert not locked & {"pytest", "mypy", "moto", "hypothesis", "e2b"}
