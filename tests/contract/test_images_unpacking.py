"""Layers of images become layers of the store: what the kernel shows of them is what the image
says, and nothing an image says leads out of it or takes more than it may."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.errors import ImageInvalid, StorageFull, TooLarge
from sojourn.images import unpacking
from sojourn.images.archives import open_archive
from sojourn.images.documents import host_platform
from sojourn.images.unpacking import Unpacked, Unpacker
from sojourn.node.mounts import mount_overlay, unmount
from sojourn.store.local import LocalStore
from support.images import MadeImage, Member, digest, directory, hardlink, layer, member, symlink

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
]

ROOM = 1 << 40


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    return LocalStore(tmp_path_factory.mktemp("images") / "store")


def unpack(store: LocalStore, image: MadeImage, room: int = ROOM) -> Unpacked:
    archive = image.archive()
    with open(os.memfd_create("archive"), "w+b", buffering=0) as file:  # noqa: PTH123
        file.write(archive)
        found = open_archive(file, None, host_platform())
        unpacker = Unpacker(store, lambda: room, threading.Event())
        return unpacker.unpack(found, lambda id: None)


@contextlib.contextmanager
def shown(store: LocalStore, unpacked: Unpacked, place: Path) -> Iterator[Path]:
    """The image as a session would see it, through the kernel's overlay."""
    for name in ("merged", "upper", "work"):
        (place / name).mkdir()
    lower = [store.layer_path(one.id) for one in reversed(unpacked.layers)]
    mount_overlay(lower, place / "upper", place / "work", place / "merged")
    try:
        yield place / "merged"
    finally:
        unmount(place / "merged")


def paths(root: Path) -> set[str]:
    found = set()
    for where, directories, files in os.walk(root):
        for name in (*directories, *files):
            found.add(str((Path(where) / name).relative_to(root)))
    return found


def test_layers_show_what_they_say(store: LocalStore, tmp_path: Path) -> None:
    low = [
        directory("etc", mode=0o750, uid=3, gid=4),
        member("etc/kept", b"kept", uid=1000, gid=1001, mode=0o640, mtime=1_500_000_000.25),
        member("etc/gone", b"gone"),
        directory("opaque"),
        member("opaque/old", b"old"),
        member("opaque/deep/old", b"old"),
        directory("turned"),
        member("turned/inside", b"x"),
        member("was-file", b"file"),
        symlink("usr-link", "real/usr"),
        directory("real/usr"),
        member("bin/su", b"#!", mode=0o4755),
        member(
            "bin/ping",
            b"ping",
            pax={"SCHILY.xattr.user.note": "yes", "SCHILY.xattr.trusted.overlay.redirect": "/etc"},
        ),
        hardlink("bin/ping2", "bin/ping"),
        member("pipe", type=tarfile.FIFOTYPE, mode=0o600),
        member("dev/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        member("hole", type=tarfile.CHRTYPE, devmajor=0, devminor=0),
        symlink("out", "/../../../etc"),
    ]
    top = [
        member("etc/.wh.gone"),
        member("opaque/new", b"new"),
        member("opaque/.wh..wh..opq"),
        member("turned", b"now a file"),
        directory("was-file"),
        member("was-file/inside", b"y"),
        member("usr-link/added", b"through a link of the layer below"),
        hardlink("etc/linked", "etc/kept"),
        member(".wh.nothing"),
        member(".wh..wh.plnk", b""),
        member("out/escaped", b"stays inside"),
    ]
    unpacked = unpack(store, MadeImage([layer(low), layer(top)]))
    assert unpacked.left_out == 3  # two devices, one attribute
    with shown(store, unpacked, tmp_path) as root:
        assert paths(root) == {
            *("etc", "etc/kept", "etc/linked", "etc/escaped"),
            *("opaque", "opaque/new", "turned", "was-file", "was-file/inside", "usr-link"),
            *("real", "real/usr", "real/usr/added", "bin", "bin/su", "bin/ping", "bin/ping2"),
            *("pipe", "out", "dev"),
        }
        facts = (root / "etc/kept").stat()
        assert (facts.st_uid, facts.st_gid, stat.S_IMODE(facts.st_mode)) == (1000, 1001, 0o640)
        assert facts.st_mtime_ns == 1_500_000_000_250_000_000 and facts.st_nlink == 2
        assert (root / "etc/linked").read_bytes() == b"kept"
        assert stat.S_IMODE((root / "bin/su").stat().st_mode) == 0o4755
        assert os.listxattr(root / "bin/ping") == ["user.note"]
        assert (root / "bin/ping2").stat().st_ino == (root / "bin/ping").stat().st_ino
        etc = (root / "etc").stat()
        assert (etc.st_uid, etc.st_gid, stat.S_IMODE(etc.st_mode)) == (3, 4, 0o750)
        assert (root / "turned").read_bytes() == b"now a file"
        assert stat.S_ISFIFO((root / "pipe").lstat().st_mode)
        assert (root / "opaque/new").read_bytes() == b"new"
    # What is in the store is what was sealed.
    for ref in unpacked.layers:
        assert list(store.verify_layer(ref)) == []


def test_an_opaque_root_hides_all_below(store: LocalStore, tmp_path: Path) -> None:
    low = [member("a/b", b"1"), member("c", b"2"), member("d/e", b"3")]
    top = [member("d/f", b"4"), member(".wh..wh..opq"), member("new", b"5")]
    unpacked = unpack(store, MadeImage([layer(low), layer(top)]))
    with shown(store, unpacked, tmp_path) as root:
        assert paths(root) == {"d", "d/f", "new"}


def test_capabilities_are_kept(store: LocalStore, tmp_path: Path) -> None:
    """As GNU tar and the builders of images write them: raw bytes in a pax record."""
    value = bytes.fromhex("010000020020000000000000" + "00" * 8)
    record = b"SCHILY.xattr.security.capability=" + value + b"\n"
    length = len(record) + 3
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, length
    payload = b"%d " % length + record
    info, content = member("ping", b"p", mode=0o755)
    raw = (
        header.tobuf(tarfile.USTAR_FORMAT)
        + payload.ljust(512, b"\0")
        + info.tobuf(tarfile.USTAR_FORMAT)
        + content.ljust(512, b"\0")
        + b"\0" * 1024
    )
    unpacked = unpack(store, MadeImage([raw]))
    with shown(store, unpacked, tmp_path) as root:
        assert os.getxattr(root / "ping", "security.capability") == value


def test_images_share_layers_and_packing_does_not_matter(store: LocalStore) -> None:
    base, one, two = (layer([member(name, name.encode())]) for name in ("base", "one", "two"))
    first = unpack(store, MadeImage([base, one], packing="+gzip"))
    second = unpack(store, MadeImage([base, two], packing="+zstd"))
    third = unpack(store, MadeImage([base, one], packing=""))
    assert first.layers[0] == second.layers[0] and first.layers[1] != second.layers[1]
    assert third == first


def test_a_long_chain_is_merged(store: LocalStore, tmp_path: Path) -> None:
    layers = [
        layer([member(f"n{number}", b"x"), member("same", b"%d" % number)]) for number in range(30)
    ]
    layers.append(layer([member(".wh.n0"), member(".wh.n29")]))
    unpacked = unpack(store, MadeImage(layers))
    assert len(unpacked.layers) == unpacking.LONG_CHAIN
    with shown(store, unpacked, tmp_path) as root:
        assert paths(root) == {"same", *(f"n{number}" for number in range(1, 29))}
        assert (root / "same").read_bytes() == b"29"


def sparse() -> Member:
    return member("holes", b"12345", pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})


def loop() -> list[Member]:
    return [symlink("a", "b"), symlink("b", "a"), member("a/x", b"")]


def deep() -> list[Member]:
    return [member("/".join(["d"] * 300) + "/x", b"")]


MALICIOUS: dict[str, list[Member]] = {
    "a name that climbs": [member("../../etc/cron.d/x", b"evil")],
    "a name that climbs inside": [member("a/../../../x", b"evil")],
    "a hard link that climbs": [hardlink("x", "../../etc/shadow")],
    "a hard link to nothing": [hardlink("x", "etc/nothing")],
    "a hard link to a directory": [directory("d"), hardlink("x", "d")],
    "a file used as a directory": [member("f", b""), member("f/x", b"")],
    "a loop of links": loop(),
    "too deep": deep(),
    "a name too long": [member("n" * 300, b"")],
    "a whiteout of nothing": [member("d/.wh.", b"")],
    "a whiteout of the parent": [member("d/.wh...", b"")],
    "a sparse file": [sparse()],
    "a root that is a file": [member(".", b"x")],
    "an unknown kind": [member("x", type=b"Z")],
    "an attribute no disk takes": [member("x", b"", pax={"SCHILY.xattr.user.a": "x" * 100_000})],
    "a capability that is none": [member("x", b"", pax={"SCHILY.xattr.security.capability": "x"})],
    "an owner who is none": [member("x", b"", pax={"uid": str(2**32 - 1)})],
    "an attribute without a name": [member("x", b"", pax={"SCHILY.xattr.user.": "x"})],
}


@pytest.mark.parametrize("what", MALICIOUS)
def test_what_no_honest_image_holds_is_refused(store: LocalStore, what: str) -> None:
    before = set((store.root / "layers").iterdir())
    with pytest.raises(ImageInvalid):
        unpack(store, MadeImage([layer(MALICIOUS[what])]))
    assert set((store.root / "layers").iterdir()) == before
    assert not any("new-" in one.name for one in (store.root / "staging").iterdir())


def test_links_lead_nowhere_but_into_the_image(store: LocalStore, tmp_path: Path) -> None:
    """Absolute names, and links planted to be written through, in one layer and over two."""
    secret = tmp_path / "outside"
    secret.write_bytes(b"untouched")
    low = [symlink("abs", str(tmp_path)), symlink("up", "../" * 20 + str(tmp_path).lstrip("/"))]
    top = [
        member("abs/outside", b"inside"),
        symlink("here", str(tmp_path)),
        member("here/second", b"inside"),
        member("/rooted", b"inside"),
        member("up/third", b"inside"),
        member("up", b"no link any more"),
    ]
    (tmp_path / "shown").mkdir()
    with shown(
        store, unpack(store, MadeImage([layer(low), layer(top)])), tmp_path / "shown"
    ) as root:
        inside = root / str(tmp_path).lstrip("/")
        assert {one.name for one in inside.iterdir()} == {"outside", "second", "third"}
        assert (inside / "outside").read_bytes() == b"inside"
        assert (root / "rooted").read_bytes() == b"inside"
    assert secret.read_bytes() == b"untouched"
    assert {one.name for one in tmp_path.iterdir()} == {"outside", "shown"}


def test_the_last_of_a_name_wins(store: LocalStore, tmp_path: Path) -> None:
    members = [
        member("x", b"first"),
        hardlink("y", "x"),
        member("x", b"second"),
        directory("d"),
        member("d/inside", b""),
        member("d", b"file"),
        member("e", b"file"),
        directory("e"),
        member("e/inside", b""),
        member(".wh.both"),
        member("both", b"stays"),
    ]
    with shown(store, unpack(store, MadeImage([layer(members)])), tmp_path) as root:
        assert paths(root) == {"x", "y", "d", "e", "e/inside", "both"}
        assert (root / "x").read_bytes() == b"second" and (root / "y").read_bytes() == b"first"


def test_bombs_end_at_their_bound(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = MadeImage([layer([member("zeros", bytes(32 << 20))])])
    assert len(zeros.archive()) < 1 << 20
    monkeypatch.setattr(unpacking, "MAX_BYTES", 8 << 20)
    with pytest.raises(TooLarge):
        unpack(store, zeros)
    monkeypatch.setattr(unpacking, "MAX_BYTES", 1 << 40)
    with pytest.raises(StorageFull):
        unpack(store, zeros, room=1)
    many = MadeImage([layer([member(f"a{n}/b", b"") for n in range(60)])])
    monkeypatch.setattr(unpacking, "MAX_ENTRIES", 100)
    with pytest.raises(TooLarge):
        unpack(store, many)
    monkeypatch.setattr(unpacking, "MAX_ENTRIES", 1000)
    monkeypatch.setattr(unpacking, "MAX_FACTS", 100)
    with pytest.raises(TooLarge):
        unpack(store, many)


def test_what_is_damaged_or_forged_is_refused(store: LocalStore) -> None:
    image = MadeImage([layer([member("x", b"x" * 5000)])])
    blob = image.manifest["layers"][0]["digest"]
    whole = image.blobs[blob]
    before = set((store.root / "layers").iterdir())
    for data in (
        whole[:-9],
        whole[:40] + bytes([whole[40] ^ 1]) + whole[41:],
        whole + b"more",
        b"",
    ):
        image.blobs[blob] = data
        with pytest.raises(ImageInvalid):
            unpack(store, image)
    image.blobs[blob] = whole
    unpack(store, image)
    forged = MadeImage([layer([member("x", b"x")])])
    other = layer([member("y", b"y")])
    config = forged.config_bytes.replace(digest(forged.layers[0]).encode(), digest(other).encode())
    forged.manifest["config"] = forged.put(config, "application/vnd.oci.image.config.v1+json")
    forged.top = forged.put(
        json.dumps(forged.manifest).encode(), "application/vnd.oci.image.manifest.v1+json"
    )
    with pytest.raises(ImageInvalid, match="digest"):
        unpack(store, forged)
    assert len(set((store.root / "layers").iterdir()) - before) == 1


def test_a_tar_of_another_tool_is_read(store: LocalStore, tmp_path: Path) -> None:
    """GNU tar with long names, a sparse-looking name and numbers beyond octal."""
    tree = tmp_path / "tree"
    long = tree / ("l" * 120) / ("m" * 120)
    long.mkdir(parents=True)
    (long / "file").write_bytes(b"long")
    (tree / "big-owner").write_bytes(b"")
    os.chown(tree / "big-owner", 3_000_000, 4_000_000)
    made = subprocess.run(
        ["tar", "--format=gnu", "-C", tree, "-c", "."], capture_output=True, check=True
    )
    (tmp_path / "shown").mkdir()
    with shown(store, unpack(store, MadeImage([made.stdout])), tmp_path / "shown") as root:
        assert (root / ("l" * 120) / ("m" * 120) / "file").read_bytes() == b"long"
        owner = (root / "big-owner").stat()
        assert (owner.st_uid, owner.st_gid) == (3_000_000, 4_000_000)


def test_a_tree_that_was_packed_is_the_same_layer(store: LocalStore, tmp_path: Path) -> None:
    """Not one property differs: the layer has the id that the tree itself gets."""
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/file").write_bytes(b"x" * 70_000)
    (tree / "link").symlink_to("sub/file")
    (tree / "second").hardlink_to(tree / "sub/file")
    os.mkfifo(tree / "pipe", 0o640)
    os.setxattr(tree / "sub/file", "user.note", b"\0\xff")
    os.chown(tree / "sub", 12345, 54321)
    (tree / "sub").chmod(0o2755)
    os.utime(tree / "sub", ns=(1_234_567_890_123_456_789,) * 2)
    made = subprocess.run(
        ["tar", "--format=pax", "--xattrs", "-C", tree, "-c", "."], capture_output=True, check=True
    )
    unpacked = unpack(store, MadeImage([made.stdout]))
    assert [one.id for one in unpacked.layers] == [store.adopt_template(tree, "tree").id]


def test_an_image_without_files_or_of_another_machine_is_refused(store: LocalStore) -> None:
    with pytest.raises(ImageInvalid, match="no file"):
        unpack(store, MadeImage([layer([])]))
    with pytest.raises(ImageInvalid, match="sparc"):
        unpack(store, MadeImage([layer([member("x", b"")])], architecture="sparc"))


def test_what_is_no_archive_is_refused() -> None:
    for data in (
        b"",
        b"x" * 4096,
        layer([member("other", b"")]),
        layer([member("index.json", b"{")]),
    ):
        file = os.memfd_create("archive")
        with open(file, "w+b", buffering=0) as archive:  # noqa: PTH123
            archive.write(data)
            with pytest.raises(ImageInvalid):
                open_archive(archive, None, host_platform())
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 1 << 33
    with io.BytesIO() as buffer:
        buffer.write(header.tobuf(tarfile.GNU_FORMAT))
        with open(os.memfd_create("archive"), "w+b", buffering=0) as archive:  # noqa: PTH123
            archive.write(buffer.getvalue())
            with pytest.raises(TooLarge):
                open_archive(archive, None, host_platform())
