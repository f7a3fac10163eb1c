"""Sessions for agent frameworks: one module for each, over the client library alone.

Guarantee: a framework's own objects work on a durable session, and whatever it does not know of
(suspend, rollback, fork) is one attribute away: each adapter gives its `session`. Each module needs
its framework, which the extra of the same name installs; nothing here is loaded without being
asked for. An adapter deletes only the sessions that it was told to, and closes only the
connections that it opened.
"""
