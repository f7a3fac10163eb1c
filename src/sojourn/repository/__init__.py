"""The object store: snapshots chunked, deduplicated, sealed and proven (docs/formats/repository.md)."""
