"""Checkpoints of several VMs, on one or several hosts, as one consistent cut."""
