"""A process that counts into a file: whether it went on, and from where, is seen in its lines.

It is one process that sleeps by itself. A loop of the shell starts a program for each pause, which
inside a sandbox costs a fifth of a processor for as long as the session runs.
"""

from __future__ import annotations


def counting(path: str = "/root/count", every: float = 0.05) -> str:
    """The command of a process that writes 1, 2, 3 ... to the end of `path`."""
    loop = f'open F, ">>", "{path}"; print F ++$i, "\\n"; close F; select undef, undef, undef, '
    return f"exec perl -e 'for (;;) {{ {loop}{every} }}'"


COUNTER = counting()
