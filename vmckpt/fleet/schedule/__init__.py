"""Schedules: checkpoints of VMs, and copies of them elsewhere, at their times."""
