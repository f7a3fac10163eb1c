"""The object store: snapshots chunked, deduplicated, sealed and proven.

docs/formats/repository.md specifies what lies in it, and in which order it is written and read.
"""
