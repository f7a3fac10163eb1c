"""The HTTP API and the service behind it."""
