"""Isolation drivers: what runs a sandbox on this host, behind one interface (`base`)."""
