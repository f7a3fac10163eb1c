"""The session service as one node of many: its lease, what it takes, releases, hands over and gives
to others, and how servers speak to it."""
