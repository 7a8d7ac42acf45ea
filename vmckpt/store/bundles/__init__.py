"""Bundles of small packs: a store of thousands of small checkpoints has few objects."""
