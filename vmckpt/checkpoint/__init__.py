"""Checkpoints of a VM: taken, restored, forked, catalogued."""
