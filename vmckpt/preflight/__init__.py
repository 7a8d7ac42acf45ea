"""Checks before an operation changes anything."""
