"""The OCI configuration of a gVisor sandbox.

Guarantee: the same specification gives the same configuration, on every node, so that what was
checkpointed under one can be restored under the other; nothing of the host's environment is in it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sojourn.node.isolation.base import SandboxSpec
from sojourn.node.isolation.gvisor_host import OWN_NETWORK

# The sandbox's own network stack; the supervisor sets its tables and keeps this for itself.
_SUPERVISOR_CAPABILITIES = ["CAP_NET_ADMIN"]

# What root inside may do: the usual set of containers, and PTRACE, without which the supervisor
# could not look at other users' processes nor a debugger work. All of it is granted by the
# sandbox's own kernel over its own objects; none of it is a capability of the host.
CAPABILITIES = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
]

_OPEN_FILES = 1_048_576


def tmpfs_size(target: str, memory: int) -> tuple[int, str]:
    """Size and mode of a memory file system.

    Half the memory as on any Linux, so that one such file system alone cannot use up the limit;
    what is only meant for sockets and pid files gets less.
    """
    share, mode = (8, "0755") if target == "/run" else (2, "1777")
    return max(16 * 1024**2, memory // share), mode


def _tmpfs(target: str, memory: int) -> dict[str, Any]:
    size, mode = tmpfs_size(target, memory)
    return {
        "destination": target,
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "nodev", f"mode={mode}", f"size={size}"],
    }


def oci_config(spec: SandboxSpec, supervisor: Path) -> dict[str, Any]:
    """The content of config.json, with `supervisor` as the first process's program."""
    sets = ("bounding", "effective", "permitted", "inheritable")
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        *(_tmpfs(target, spec.limits.memory_bytes) for target in spec.tmpfs),
        {
            "destination": "/run/sojourn/node",
            "type": "bind",
            "source": os.fspath(spec.control),
            "options": ["ro", "rbind"],
        },
        {
            "destination": "/run/sojourn/supervisor",
            "type": "bind",
            "source": os.fspath(supervisor),
            "options": ["ro", "bind"],
        },
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": ["/run/sojourn/supervisor", OWN_NETWORK, *spec.argv],
            "env": [f"{name}={value}" for name, value in spec.env.items()],
            "cwd": "/",
            "capabilities": {name: CAPABILITIES + _SUPERVISOR_CAPABILITIES for name in sets},
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": _OPEN_FILES, "hard": _OPEN_FILES}],
            "noNewPrivileges": False,
        },
        "root": {"path": os.fspath(spec.root), "readonly": False},
        "hostname": spec.hostname,
        "mounts": mounts,
        "linux": {
            "namespaces": [
                *({"type": kind} for kind in ("pid", "ipc", "uts", "mount")),
                # The one the runtime is started in; see gvisor_host.surroundings.
                {"type": "network", "path": "/proc/self/ns/net"},
            ],
        },
    }
