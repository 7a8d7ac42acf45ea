"""Routine operations on several VMs or hosts: drains, schedules, guards."""
