"""The snapshot store: sealed layers, memory images and snapshot manifests by content address.

`local` has the store itself, `base` its interface, `fingerprints` what tells equal snapshots.
"""
