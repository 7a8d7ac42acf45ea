"""Processes on a host: how they start and end, which turn and how much memory they get."""
