"""Drain a host: where each VM goes, in which order, and back again."""
