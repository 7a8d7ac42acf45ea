"""Damage in a store: recorded, excluded from new checkpoints, located, healed."""
