"""Checks before the migration of a libvirt domain."""
