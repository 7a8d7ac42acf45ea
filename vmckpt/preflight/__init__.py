"""Checks: what is found out before an operation changes anything, whoever asks."""
