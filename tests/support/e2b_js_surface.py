"""The public methods of E2B's JavaScript SDKs, each with whether it works against this server.

As `e2b_surface` for Python: `found` reads the declarations of the installed packages (what they
declare private or protected is not public), `KNOWN` says what becomes of each.
"""

from __future__ import annotations

import re

from support.e2b_surface import GIT, LOCAL, NO, NO_MCP, YES, Row
from support.javascript import HERE

_PACKAGES = ("e2b", "@e2b/code-interpreter")
_CLASS = re.compile(r"^declare (?:abstract )?class (\w+)(?:<.*?>)?(?: extends ([\w$]+))?.*\{$")
_MEMBER = re.compile(
    r"^  (?P<marks>(?:(?:private|protected|static|readonly|abstract|async|get|set) )*)"
    r"(?P<name>\w+)\??[(<:;]"
)


def _declared(package: str) -> dict[str, tuple[str | None, set[str]]]:
    """Classes of a package: the one each extends, and its own public members."""
    text = (HERE / "node_modules" / package / "dist" / "index.d.ts").read_text()
    classes: dict[str, tuple[str | None, set[str]]] = {}
    members: set[str] | None = None
    for line in text.splitlines():
        if found := _CLASS.match(line):
            members = set()
            classes[found[1]] = (found[2], members)
        elif line == "}":
            members = None
        elif members is not None and (found := _MEMBER.match(line)):
            hidden = {"private", "protected"} & set(found["marks"].split())
            if not hidden and found["name"] != "constructor":
                members.add(found["name"])
    return classes


def found() -> dict[str, set[str]]:
    """What the installed SDKs have."""
    base, interpreter = (_declared(package) for package in _PACKAGES)

    def members(classes: dict[str, tuple[str | None, set[str]]], name: str) -> set[str]:
        parent, own = classes[name]
        return own | (members(classes, parent) if parent in classes else set())

    names = {shown: members(base, name) for shown, name in CLASSES.items()}
    names["code interpreter"] = interpreter["Sandbox"][1]
    return names


CLASSES = {
    "Sandbox": "Sandbox",
    "sandbox.commands": "Commands",
    "sandbox.files": "Filesystem",
    "sandbox.pty": "Pty",
    "sandbox.git": "Git",
    "CommandHandle": "CommandHandle",
    "WatchHandle": "WatchHandle",
    "SandboxPaginator": "SandboxPaginator",
    "SnapshotPaginator": "SnapshotPaginator",
    "SecretPaginator": "SecretPaginator",
    "Template": "TemplateBase",
    "Volume": "Volume",
    "Secret": "Secret",
    "E2B": "E2B",
}
"""By the name they are shown under."""

_GIT_METHODS = (
    *("add", "branches", "checkoutBranch", "clone", "commit", "configureUser", "createBranch"),
    *("dangerouslyAuthenticate", "deleteBranch", "getConfig", "init", "pull", "push", "remoteAdd"),
    *("remoteGet", "reset", "restore", "setConfig", "status"),
)
_BUILDER = (
    *("addMcpServer", "aptInstall", "betaDevContainerPrebuild", "betaSetDevContainerStart"),
    *("bunInstall", "copy", "copyItems", "fromAWSRegistry", "fromAlpineImage", "fromArchImage"),
    *("fromBaseImage", "fromBunImage", "fromDebianImage", "fromDockerfile", "fromFedoraImage"),
    *("fromGCPRegistry", "fromImage", "fromNodeImage", "fromPythonImage", "fromTemplate"),
    *("fromUbuntuImage", "gitClone", "makeDir", "makeSymlink", "npmInstall", "pipInstall"),
    *("remove", "rename", "runCmd", "setEnvs", "setReadyCmd", "setStartCmd", "setUser"),
    *("setWorkdir", "skipCache", "toDockerfile", "toJSON"),
)
_PAGES: dict[str, Row] = {
    "nextItems": (YES, ""),
    "hasNext": (LOCAL, ""),
    "nextToken": (LOCAL, ""),
}


def _rows(row: Row, *names: str) -> dict[str, Row]:
    return dict.fromkeys(names, row)


KNOWN: dict[str, dict[str, Row]] = {
    "Sandbox": {
        "create": (
            YES,
            "`mcp`, `iam`, `volumeMounts`, `network.rules` and a timeout that pauses files only"
            " are refused",
        ),
        "connect": (YES, "never shortens the time"),
        **_rows(
            (YES, ""),
            *("list", "kill", "getInfo", "getFullInfo", "isRunning", "fork", "createSnapshot"),
            *("listSnapshots", "deleteSnapshot", "trafficAccessToken", "commands", "files", "pty"),
        ),
        "getMetrics": (YES, "one sample of this moment; there is no history"),
        "setTimeout": (YES, "of a running sandbox"),
        "pause": (YES, "with memory or without"),
        "betaPause": (YES, "the same"),
        "updateNetwork": (
            YES,
            "all traffic, none, or none but a list; single denials and rules are refused",
        ),
        **_rows((YES, "signed"), "downloadUrl", "uploadUrl"),
        "getHost": (YES, "see [Ports](#ports)"),
        **_rows((NO, NO_MCP), "getMcpToken", "getMcpUrl"),
        "git": (YES, GIT),
        **_rows((LOCAL, ""), "sandboxId", "sandboxDomain"),
    },
    "sandbox.commands": {
        "run": (YES, "the timeout ends the whole group of processes"),
        "connect": (YES, "also to commands of before a pause, and to ended ones still known"),
        "list": (YES, "commands of every client, those of Sojourn's own SDK too"),
        "kill": (YES, "the whole group"),
        **_rows((YES, ""), "sendStdin", "closeStdin"),
        "supportsStdinClose": (LOCAL, "always"),
    },
    "sandbox.files": {
        "read": (YES, "text, bytes, blob and stream"),
        "write": (YES, "whole or not at all; `metadata` is refused (`InvalidArgumentError`)"),
        "writeFiles": (YES, "the same for each file"),
        **_rows((YES, ""), "list", "exists", "getInfo", "remove", "rename", "makeDir", "watchDir"),
    },
    "sandbox.pty": _rows((YES, ""), "create", "connect", "kill", "resize", "sendInput"),
    "sandbox.git": _rows((YES, GIT), *_GIT_METHODS),
    "CommandHandle": {
        **_rows((YES, ""), "wait", "kill", "sendStdin", "closeStdin"),
        "disconnect": (YES, "the command goes on"),
        **_rows((LOCAL, ""), "pid", "stdout", "stderr", "error", "exitCode"),
    },
    "WatchHandle": {"stop": (YES, "")},
    "SandboxPaginator": _PAGES,
    "SnapshotPaginator": _PAGES,
    "code interpreter": {
        "runCode": (YES, "Python; what code writes arrives when it is done"),
        "createCodeContext": (YES, "Python"),
        **_rows((YES, ""), "listCodeContexts", "restartCodeContext", "removeCodeContext"),
    },
    "Template": {
        "exists": (YES, "names of this server's templates and of snapshots"),
        "aliasExists": (YES, "the same"),
        **_rows(
            (NO, "templates are made with `sojourn template` (`BuildError` or `TemplateError`)"),
            *("build", "buildInBackground", "getBuildStatus", "assignTags", "removeTags"),
            "getTags",
        ),
        **_rows((LOCAL, "describes a build"), *_BUILDER),
    },
    "Volume": {
        **_rows(
            (NO, "a session's own files last (`VolumeError`)"),
            *("connect", "create", "destroy", "exists", "getInfo", "list", "makeDir"),
            *("readFile", "remove", "updateMetadata", "writeFile"),
        ),
        **_rows((LOCAL, ""), "name", "token", "volumeId", "debug", "domain", "proxy"),
    },
    "Secret": {
        **_rows(
            (NO, "secrets are set with `sojourn secret` (`SecretError`)"),
            *("create", "destroy", "exists", "getInfo", "list", "update"),
        ),
        "fill": (LOCAL, "for `network.rules`, which are refused"),
        "iamToken": (LOCAL, "for `iam`, which is refused"),
    },
    "SecretPaginator": {**_PAGES, "nextItems": (NO, "as `Secret`")},
    "E2B": _rows(
        (LOCAL, "these classes, bound to options"), *("Sandbox", "Template", "Volume", "Secret")
    ),
}
