"""The SQLite connector: one file, one writer thread, separate readers."""
