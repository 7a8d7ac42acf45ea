"""Restore: the VM in place, a copy, forks, or its disks alone."""
