"""Checkpoints of several VMs as of one consistent cut, on whatever hosts they are."""
