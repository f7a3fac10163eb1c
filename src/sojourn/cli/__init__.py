"""The command line: one module per group of commands, each a thin layer over the client."""
