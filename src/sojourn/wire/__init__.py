"""Schemas and byte frames shared by all sides."""
