"""Checks before a replication."""
