"""Fencing: proof that an old primary can no longer act."""
