"""Reading the host's package sources, and choosing Debian's mirror among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sojourn.errors import HostUnfit
from sojourn.node.setup import apt
from sojourn.node.setup.apt import AptSource, Mirror

ONE_LINE = """\
# deb http://commented.example/debian bookworm main
deb http://mirror.example/debian bookworm main contrib   # trailing remark
deb-src http://mirror.example/debian bookworm main
deb [arch=amd64,arm64 signed-by=/keys/a.gpg] http://mirror.example/debian/ bookworm-updates main
 deb [ trusted=yes lang+=de ] file:/srv/repo ./
deb
deb http://mirror.example/incomplete
"""


def test_one_line_entries() -> None:
    assert list(apt.parse_one_line(ONE_LINE)) == [
        AptSource(("http://mirror.example/debian",), ("bookworm",), ("main", "contrib")),
        AptSource(
            ("http://mirror.example/debian/",),
            ("bookworm-updates",),
            ("main",),
            {"arch": "amd64 arm64", "signed-by": "/keys/a.gpg"},
        ),
        AptSource(("file:/srv/repo",), ("./",), (), {"trusted": "yes", "lang": "de"}),
    ]


DEB822 = """\
# A remark before
Types: deb deb-src
# a remark within
URIs: http://one.example/debian
 http://two.example/debian
Suites: trixie trixie-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
Enabled: no
URIs: http://off.example/debian
Suites: trixie
Components: main


Types: deb-src
URIs: http://source.example/debian
Suites: trixie
Components: main
\t
types: deb
uris: http://lower.example/debian
suites: trixie
components: main
architectures: amd64
"""


def test_deb822_paragraphs() -> None:
    first, second = apt.parse_deb822(DEB822)
    assert first.uris == ("http://one.example/debian", "http://two.example/debian")
    assert first.suites == ("trixie", "trixie-updates")
    assert first.options["signed-by"].splitlines()[2:] == [
        ".",
        "abc",
        "-----END PGP PUBLIC KEY BLOCK-----",
    ]
    assert second == AptSource(
        ("http://lower.example/debian",), ("trixie",), ("main",), {"architectures": "amd64"}
    )


def test_deb822_with_dos_line_ends() -> None:
    (source,) = apt.parse_deb822("Types: deb\r\nURIs: http://a/\r\nSuites: s\r\nComponents: main")
    assert source == AptSource(("http://a/",), ("s",), ("main",))


def test_host_sources_reads_both_forms_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://a/debian s main\n")
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (parts / "b.sources").write_text("Types: deb\nURIs: http://b/\nSuites: s\nComponents: main\n")
    (parts / "c.list").write_text("deb http://c/debian s main\n")
    (parts / "d.list.disabled").write_text("deb http://d/debian s main\n")
    (parts / "e.sources.save").write_text("Types: deb\nURIs: http://e/\nSuites: s\n")
    found = [source.uris[0] for source in apt.host_sources(tmp_path)]
    assert found == ["http://a/debian", "http://b/", "http://c/debian"]


def test_no_sources_at_all(tmp_path: Path) -> None:
    assert apt.host_sources(tmp_path) == []


KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
KEYRING = {"signed-by": KEYS}


def test_mirror_of_a_stock_host() -> None:
    sources = [
        AptSource(("http://x/debian-security",), ("bookworm-security",), ("main",), KEYRING),
        AptSource(("http://x/debian",), ("bookworm", "bookworm-updates"), ("main",), KEYRING),
    ]
    assert apt.debian_mirrors(sources, "bookworm") == [Mirror("http://x/debian", KEYS)]
    assert apt.security_archives(sources, "bookworm") == [Mirror("http://x/debian-security", KEYS)]


def test_archives_of_others_come_after_debian() -> None:
    sources = [
        AptSource(("https://o.example/php",), ("bookworm",), ("main",), {"signed-by": "/o.gpg"}),
        AptSource(("https://tool.example/linux/debian",), ("bookworm",), ("stable",)),
        AptSource(("http://cache.local:3142/deb",), ("bookworm",), ("main", "contrib")),
        AptSource(("http://cache.local:3142/deb",), ("bookworm-updates",), ("main",)),
        AptSource(("http://x/debian",), ("bookworm-backports",), ("main",)),
    ]
    found = [mirror.uri for mirror in apt.debian_mirrors(sources, "bookworm")]
    assert found == ["http://cache.local:3142/deb", "https://o.example/php"]


def test_several_mirrors_keep_their_order_and_appear_once() -> None:
    sources = [
        AptSource(("http://a/debian/", "http://b/debian"), ("trixie",), ("main",), KEYRING),
        AptSource(("http://a/debian",), ("trixie",), ("main",), KEYRING),
    ]
    found = [mirror.uri for mirror in apt.debian_mirrors(sources, "trixie")]
    assert found == ["http://a/debian", "http://b/debian"]


def test_suite_may_be_named_stable() -> None:
    sources = [AptSource(("http://x/debian",), ("stable",), ("main",))]
    assert apt.debian_mirrors(sources, "bookworm") == [Mirror("http://x/debian", None)]


def test_paragraph_names_the_keyring_file() -> None:
    text = apt.source_paragraph(Mirror("http://x/debian", "/k.gpg"), ["s", "s-updates"])
    (source,) = apt.parse_deb822(text)
    assert source == AptSource(
        ("http://x/debian",), ("s", "s-updates"), ("main",), {"signed-by": "/k.gpg"}
    )


def test_paragraph_keeps_keys_in_armour() -> None:
    (first, _) = apt.parse_deb822(DEB822)
    text = apt.source_paragraph(Mirror("http://x/debian", first.options["signed-by"]), ["s"])
    (again,) = apt.parse_deb822(text)
    assert again.options["signed-by"] == first.options["signed-by"]


@pytest.mark.parametrize(
    ("text", "codename"),
    [
        ('ID=debian\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian 12"\n', "bookworm"),
        ('NAME="x"\nVERSION_CODENAME="trixie"\nID="debian"\n', "trixie"),
    ],
)
def test_codename(tmp_path: Path, text: str, codename: str) -> None:
    path = tmp_path / "os-release"
    path.write_text(text)
    assert apt.host_codename(path) == codename


@pytest.mark.parametrize("text", ["ID=fedora\nVERSION_CODENAME=x\n", "ID=debian\n", ""])
def test_another_system_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "os-release"
    path.write_text(text)
    with pytest.raises(HostUnfit) as caught:
        apt.host_codename(path)
    assert "SOJOURN_RUNSC" in caught.value.next_step


def test_private_apt_keeps_to_its_directory(tmp_path: Path) -> None:
    apt.PrivateApt(tmp_path, apt.source_paragraph(Mirror("http://x/debian", "/k.gpg"), ["s"]))
    lines = (tmp_path / "apt.conf").read_text().splitlines()
    set_paths = [line.split('"')[1] for line in lines if line.startswith("Dir::")]
    assert len(set_paths) == 6
    assert all(path == "/dev/null" or path.startswith(str(tmp_path)) for path in set_paths)
    assert "#clear APT::Update::Post-Invoke-Success;" in lines
