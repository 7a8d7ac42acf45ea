"""Bundles of small packs: even thousands of small checkpoints need few objects."""
