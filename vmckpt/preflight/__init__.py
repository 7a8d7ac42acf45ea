"""Checks that run before an operation changes anything."""
