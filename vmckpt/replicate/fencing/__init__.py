"""Fencing: proof that an old primary can do nothing any more."""
