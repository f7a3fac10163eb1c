"""What one layer or image needs: the names of all its chunks.

Guarantee: the answer is complete, or ObjectMissing or IntegrityError names what cannot be read.
"""

from __future__ import annotations

import msgspec

from sojourn.errors import IntegrityError
from sojourn.repository.cutting import SMALL_FILE, decode_recipe
from sojourn.repository.domains import Domain
from sojourn.repository.downloads import Reader
from sojourn.repository.images import decode_image
from sojourn.repository.layers import LayerObject, decode_layer
from sojourn.repository.records import CHUNK_DATA, CHUNK_RECIPE, CHUNK_SEGMENT
from sojourn.repository.sealed import IMAGE, LAYER
from sojourn.store.layers import object_name as layer_object
from sojourn.store.manifests import FILE, Entry

_entries = msgspec.msgpack.Decoder(list[Entry])


def add_layer(domain: Domain, layer: str, chunks: set[bytes]) -> None:
    """Add the names of all chunks of a layer: segments, recipes, contents. Segments and recipes
    whose names are there already are not read again. Several threads may add to one set. Raises
    ObjectMissing, IntegrityError."""
    chunk_name = domain.keys.chunk_name
    root = read_layer(domain, layer)
    fresh = {chunk_name(CHUNK_SEGMENT, content) for content in root.segments} - chunks
    large: dict[bytes, int] = {}
    read = Reader(domain).chunks
    for name, data in read(fresh, needed_by=layer_object(layer)):
        for entry in decode_segment(data, name):
            if entry.type != FILE or not entry.size or entry.link is not None:
                continue
            if entry.size <= SMALL_FILE:
                chunks.add(chunk_name(CHUNK_DATA, entry.digest))
                continue
            recipe = chunk_name(CHUNK_RECIPE, entry.digest)
            if recipe not in chunks:
                large[recipe] = entry.size
    for recipe, data in read(large, needed_by=layer_object(layer)):
        for content, _ in decode_recipe(data, large[recipe], f"chunk {recipe.hex()}"):
            chunks.add(chunk_name(CHUNK_DATA, content))
        chunks.add(recipe)
    # Last, because they stand for all of the above when the next layer has them too.
    chunks |= fresh


def add_image(domain: Domain, image: str, chunks: set[bytes]) -> None:
    """Add the names of all chunks of a memory image. Raises ObjectMissing, IntegrityError."""
    chunk_name = domain.keys.chunk_name
    root = decode_image(domain.get_root(IMAGE, domain.image_key(image)), image)
    chunks.update(chunk_name(CHUNK_DATA, content) for content in root.chunk_ids())


def read_layer(domain: Domain, layer: str) -> LayerObject:
    """A layer's root object. Raises ObjectMissing, IntegrityError."""
    return decode_layer(domain.get_root(LAYER, domain.layer_key(layer)), layer)


def decode_segment(data: bytes, name: bytes) -> list[Entry]:
    """The entries of a segment. Raises IntegrityError."""
    try:
        return _entries.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = f"chunk {name.hex()}"
        raise IntegrityError(f"{shown} is no segment: {error}", object=shown) from None
