"""The disks of a replicated VM: written through to its standby epoch by epoch."""
