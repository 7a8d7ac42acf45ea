"""Draining a host: which VM goes where, in which order, and back again."""
