"""Restoring: a VM as it was, copies of it, or disks alone."""
