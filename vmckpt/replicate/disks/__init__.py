"""The disks of a replicated VM: their writes reach the standby epoch by epoch."""
