"""The command line of bwrap for a sandbox.

Guarantee: nothing of the host can be seen or changed beyond the root tree, the two binds and the
harmless devices; nothing of the host's environment is inside.
"""

from __future__ import annotations

import os
from pathlib import Path

from sojourn.node.isolation.base import SandboxSpec
from sojourn.node.isolation.gvisor_config import CAPABILITIES, tmpfs_size

# What the kernel lets uid 0 of the host do whatever its capabilities: only looking is left.
_READ_ONLY = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
# What tells about the host or its memory: covered.
_COVERED = (
    "/proc/kcore",
    "/proc/keys",
    "/proc/key-users",
    "/proc/kmsg",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/sched_debug",
    "/proc/kallsyms",
)


def arguments(spec: SandboxSpec, info: int, block: int) -> list[str]:
    """All options. `info` and `block` are descriptors bwrap reports to and waits on.

    The user namespace's maps are written from outside between the two, because bwrap itself maps
    one user only.
    """
    words = [
        *("--unshare-user", "--userns-block-fd", str(block), "--info-fd", str(info)),
        *("--uid", "0", "--gid", "0"),
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"),
        "--unshare-cgroup-try",
        *("--hostname", spec.hostname),
        *("--bind", os.fspath(spec.root), "/"),
        *("--proc", "/proc"),
        *("--dev", "/dev"),
    ]
    for path in _READ_ONLY:
        words += ["--ro-bind-try", path, path]
    for path in _COVERED:
        if Path(path).exists():
            words += ["--ro-bind", "/dev/null", path]
    for target in spec.tmpfs:
        size, mode = tmpfs_size(target, spec.limits.memory_bytes)
        words += ["--perms", mode, "--size", str(size), "--tmpfs", target]
    words += [
        *("--ro-bind", os.fspath(spec.control), "/run/sojourn/node"),
        *("--ro-bind", os.fspath(spec.supervisor), "/run/sojourn/supervisor"),
        *("--cap-drop", "ALL"),
    ]
    for name in CAPABILITIES:
        words += ["--cap-add", name]
    words.append("--clearenv")
    for name, value in spec.env.items():
        words += ["--setenv", name, value]
    return [*words, "--chdir", "/", "--new-session", "--as-pid-1"]
