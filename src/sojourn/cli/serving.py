"""Options that several of the commands that serve have.

Guarantee: the same option means the same at each of them.
"""

from __future__ import annotations

from pathlib import Path

import click

store_key_file_option = click.option(
    "--store-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the secret that encrypts a new object store and opens an encrypted one."
    " [SOJOURN_STORE_KEY_FILE, or the secret itself in SOJOURN_STORE_KEY]",
)

cache_bytes_option = click.option(
    "--cache-bytes",
    type=click.IntRange(min=0),
    envvar="SOJOURN_CACHE_BYTES",
    help="Most the node's own store takes; what is durable and unused goes first. [no limit]",
)

e2b_internet_option = click.option(
    "--e2b-internet",
    envvar="SOJOURN_E2B_INTERNET",
    is_flag=True,
    help="Let sandboxes of E2B's clients reach the internet where they do not say whether they may."
    " [SOJOURN_E2B_INTERNET]",
)

overcommit_option = click.option(
    "--overcommit",
    envvar="SOJOURN_OVERCOMMIT",
    default="cpus=8,memory=2,disk=4",
    show_default=True,
    help="How many times what a node has the limits of its sandboxes may add up to; the same at all"
    " servers and nodes. [SOJOURN_OVERCOMMIT]",
)
