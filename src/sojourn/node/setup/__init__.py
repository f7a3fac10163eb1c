"""Bringing a host what Sojourn needs: runsc, the supervisor, a template.

Guarantee: a set-up can be interrupted, repeated, or run twice at once; what it publishes is either
wholly there or not there at all, and is never changed afterwards, because sandboxes may be using
it. The host's own configuration is left alone: only packages are added, by the host's own means.
"""
