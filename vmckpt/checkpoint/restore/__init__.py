"""Restore: the VM in place, a copy, forks, or only its disks."""
