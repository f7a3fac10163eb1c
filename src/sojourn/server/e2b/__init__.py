"""Sessions as E2B sandboxes: the HTTP interfaces that E2B's SDKs speak, over the session service.

Guarantee: a program written against E2B's SDK runs unchanged once its environment variables point
here; what cannot be done is refused with a status the SDK knows, never answered with something
else. Nothing here holds state a restart would miss: sandboxes are sessions, and what E2B wants to
know of them beyond that is in reserved labels of the session.
"""
