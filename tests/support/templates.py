"""A template a third the size of the host's, for tests of what lies in an object store.

There the template is most of what is sent, checked, repaired and fetched again, and of no interest.
It is the host's without the largest things that no command of those tests needs: shells, the usual
commands, Perl and Python with its library are there as in the host's.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from sojourn.node.tools import template_version

NAME = "debian"

WITHOUT = (
    "./var/cache/*",
    "./var/lib/apt",
    "./var/lib/dpkg",
    "./usr/lib/apt",
    "./usr/lib/git-core",
    "./usr/lib/python3/*",
    *(f"./usr/lib/python3.*/{part}" for part in ("ensurepip", "idlelib", "lib2to3", "pydoc_data")),
    *(f"./usr/lib/python3.*/{part}" for part in ("distutils", "test", "unittest")),
    *(f"./usr/share/{part}" for part in ("bash-completion", "lintian", "perl*")),
    *(f"./usr/share/{part}" for part in ("python-wheels", "zoneinfo")),
    *(f"./usr/bin/{part}" for part in ("*git*", "perl?*", "openssl", "scalar")),
    *(f"./usr/lib/*-linux-gnu/{part}" for part in ("gconv", "perl", "libperl*", "libapt-*")),
    *(f"./usr/lib/*-linux-gnu/{part}" for part in ("libcurl-gnutls*", "libdb-*")),
    *(f"./usr/lib/*-linux-gnu/{part}" for part in ("libmvec*", "libstdc++*")),
)


def lay_small(templates: Path) -> None:
    """Lay it below a directory of templates, under the name of the host's."""
    whole, root = template_version(NAME) / "root", templates / NAME / "root"
    root.mkdir(parents=True)
    left_out = [f"--exclude={one}" for one in WITHOUT]
    reading = ["tar", "-C", str(whole), *left_out, "-cf", "-", "."]
    with subprocess.Popen(reading, stdout=subprocess.PIPE) as packing:
        subprocess.run(["tar", "-C", str(root), "-xpf", "-"], stdin=packing.stdout, check=True)
    assert packing.returncode == 0
