"""Sojourn: stateful execution for AI agents."""
