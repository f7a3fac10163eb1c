"""What is sent of a memory image: the pages its parent lacks, once; the map gives all back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from blake3 import blake3

from sojourn.errors import IntegrityError
from sojourn.model.snapshots import MemoryRef
from sojourn.repository.domains import Domain
from sojourn.repository.images import PAGE, ImageMap, decode_image, encode_image
from sojourn.repository.images_out import PageMemory, is_paged, publish_image, push_image
from sojourn.repository.sealed import IMAGE
from sojourn.repository.uploads import Upload
from sojourn.store.fingerprints import image_digest
from support.uploads import SECRET, Told, domain_on, files_of

R = random.Random(9)
Image = tuple[MemoryRef, Path]


def pages(count: int) -> list[bytes]:
    return [bytes(PAGE) if number % 5 == 0 else R.randbytes(PAGE) for number in range(count)]


def write(directory: Path, **files: bytes) -> Image:
    directory.mkdir()
    listed = {}
    for name, data in files.items():
        name = name.replace("_img", ".img")
        (directory / name).write_bytes(data)
        listed[name] = (len(data), blake3(data).hexdigest())
    ref = MemoryRef(
        id=image_digest(listed),
        bytes=sum(size for size, _ in listed.values()),
        files=listed,
        driver="gvisor",
        runtime="r",
        cpu=["sse"],
    )
    return ref, directory


def push(
    domain: Domain, image: Image, parent: Image | None = None, memory: PageMemory | None = None
) -> tuple[Upload, ImageMap]:
    with Upload(domain) as up:
        made = push_image(domain, up, *image, parent, memory=memory or PageMemory())
        up.flush()
    publish_image(domain, made)
    return up, made


def check(domain: Domain, image: Image) -> ImageMap:
    """The image's map from the store, after its files were put together and compared."""
    ref, directory = image
    found = decode_image(domain.get_object(IMAGE, domain.image_key(ref.id)), ref.id)
    for name, data in files_of(domain, found).items():
        assert data == (directory / name).read_bytes(), name
    return found


@pytest.mark.parametrize("secret", [None, SECRET])
def test_an_image_is_in_the_store_without_its_zero_pages(tmp_path, secret):
    told = Told()
    memory = b"".join(pages(1000))
    image = write(
        tmp_path / "i",
        pages_img=memory + bytes(3 << 20) + b"end of a file that fills no page",
        pages_meta_img=R.randbytes(70_001),
        checkpoint_img=R.randbytes((2 << 20) + 1),
        empty_img=b"",
        small_pages_img=bytes(100),
    )
    up, _ = push(domain_on(told, secret), image)
    fresh = domain_on(told, secret)
    assert fresh.has_image(image[0].id)
    check(fresh, image)
    assert up.sent_bytes == 800 * PAGE + 32 + 70_001 + (2 << 20) + 1 + 100
    again, _ = push(domain_on(told, secret), image)
    assert again.sent_bytes == 0


@pytest.mark.parametrize("remembered", [True, False])
def test_only_the_pages_the_parent_lacks_are_sent(tmp_path, remembered):
    told = Told()
    memory = PageMemory() if remembered else None
    content = pages(2000)
    first = write(tmp_path / "a", pages_img=b"".join(content))
    push(domain_on(told), first, memory=memory)
    # Pages change, one more moves all behind it, some lie elsewhere, some are there twice.
    fresh = [R.randbytes(PAGE) for _ in range(20)]
    for number, page in enumerate(fresh[:19]):
        content[number * 100 + 1] = page
    content.insert(500, fresh[19])
    content[1200:1300], content[1300:1400] = content[1300:1400], content[1200:1300]
    content += content[:50] + fresh[:3]
    second = write(tmp_path / "b", pages_img=b"".join(content))
    if remembered:
        for file in first[1].iterdir():
            file.unlink()
    domain = domain_on(told)
    up, _ = push(domain, second, first, memory)
    assert up.sent_bytes == 20 * PAGE
    assert up.relied
    made = check(domain_on(told), second)
    assert len(encode_image(made)) < 20 * PAGE
    # And a child of the child.
    content[7] = R.randbytes(PAGE)
    third = write(tmp_path / "c", pages_img=b"".join(content))
    up, _ = push(domain_on(told), third, second, memory)
    assert up.sent_bytes == PAGE
    check(domain_on(told), third)


def test_a_series_stores_little_more_than_what_changes(tmp_path):
    told = Told()
    memory = PageMemory()
    content = pages(4000)
    image = write(tmp_path / "0", pages_img=b"".join(content))
    domain = domain_on(told)
    push(domain, image, memory=memory)
    before = sum(info.size for info in domain.backend.list("ten_1/"))
    changed = 0
    for generation in range(1, 6):
        for _ in range(40):
            content[R.randrange(1, 4000)] = R.randbytes(PAGE)
            changed += 1
        child = write(tmp_path / str(generation), pages_img=b"".join(content))
        push(domain, child, image, memory)
        image = child
    after = sum(info.size for info in domain.backend.list("ten_1/"))
    assert after - before < 1.3 * changed * PAGE
    check(domain_on(told), image)


@pytest.mark.parametrize("how", ["gone", "changed", "no image", "damaged map"])
def test_a_parent_that_cannot_be_read_only_costs_the_saving(tmp_path, how):
    told = Told()
    content = b"".join(pages(300))
    first = write(tmp_path / "a", pages_img=content)
    domain = domain_on(told)
    if how != "no image":
        push(domain, first)
    if how == "gone":
        (first[1] / "pages.img").unlink()
    elif how == "changed":
        (first[1] / "pages.img").write_bytes(content[:-1] + b"!")
    elif how == "damaged map":
        told.backend.put(domain.image_key(first[0].id), b"damaged")
    second = write(tmp_path / "b", pages_img=R.randbytes(PAGE) + content)
    up, _ = push(domain, second, first)
    assert up.sent_bytes == 241 * PAGE
    check(domain_on(told), second)


@pytest.mark.parametrize("remembered", [True, False])
def test_pages_whose_chunks_are_marked_are_sent_again(tmp_path, remembered):
    told = Told()
    memory = PageMemory() if remembered else None
    content = pages(3000)
    first = write(tmp_path / "a", pages_img=b"".join(content))
    push(domain_on(told), first, memory=memory)
    domain = domain_on(told)
    content[3] = R.randbytes(PAGE)
    second = write(tmp_path / "b", pages_img=b"".join(content))
    dead = [pack.id for pack in domain.index.packs()]
    domain.index.exclude(dead)
    up, _ = push(domain, second, first, memory)
    assert up.sent_bytes == 2400 * PAGE
    assert not up.relied
    domain.index.remove(dead)
    told.backend.delete([domain.pack_key(id) for id in dead])
    check(domain, second)


@pytest.mark.parametrize("name", ["pages.img", "checkpoint.img", "large.img"])
@pytest.mark.parametrize("how", ["flipped", "shorter", "longer", "gone", "link"])
def test_a_file_that_differs_is_named_and_nothing_published(tmp_path, name, how):
    told = Told()
    domain = domain_on(told)
    image = write(
        tmp_path / "a",
        pages_img=b"".join(pages(100)),
        checkpoint_img=R.randbytes(5000),
        large_img=R.randbytes(3 << 20),
    )
    path = image[1] / name
    data = path.read_bytes()
    if how == "flipped":
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif how == "shorter":
        path.write_bytes(data[:-1])
    elif how == "longer":
        path.write_bytes(data + bytes(PAGE))
    else:
        path.unlink()
    if how == "link":
        path.symlink_to("/etc/passwd")
    with pytest.raises(IntegrityError) as caught:
        push(domain, image)
    assert caught.value.details["object"] == f"memory {image[0].id}"
    assert caught.value.details["path"] == name
    assert not domain_on(told).has_image(image[0].id)


def test_an_image_that_failed_is_no_parent_with_pages_nobody_has(tmp_path):
    told = Told()
    memory = PageMemory()
    content = b"".join(pages(300))
    first = write(tmp_path / "a", pages_img=content)
    domain = domain_on(told)
    with pytest.raises(RuntimeError), Upload(domain) as up:
        push_image(domain, up, *first, memory=memory)
        raise RuntimeError("before anything was put")
    second = write(tmp_path / "b", pages_img=content + R.randbytes(PAGE))
    up, _ = push(domain, second, first, memory)
    assert up.sent_bytes == 241 * PAGE
    check(domain_on(told), second)


def test_what_is_remembered_is_bounded(tmp_path):
    told = Told()
    memory = PageMemory(most=500)
    domain = domain_on(told)
    images = [write(tmp_path / str(n), pages_img=b"".join(pages(300))) for n in range(3)]
    for image in images:
        push(domain, image, memory=memory)
    known = [memory.get(domain, ref.id) is not None for ref, _ in images]
    assert known == [False, True, True]
    push(domain, write(tmp_path / "large", pages_img=R.randbytes(600 * PAGE)), memory=memory)
    assert memory.get(domain, images[2][0].id) is None
    assert memory.get(domain_on(told, name="ten_2"), images[2][0].id) is None


def test_which_files_are_looked_at_in_pages():
    assert is_paged("pages.img", 65536)
    assert is_paged("sub/pages-1.img", 1 << 30)
    assert not is_paged("pages.img", 65535)
    assert not is_paged("pages_meta.bin", 1 << 20)
    assert not is_paged("checkpoint.img", 1 << 20)
