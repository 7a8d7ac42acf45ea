"""Checks before the migration of a VM that vmckpt runs."""
