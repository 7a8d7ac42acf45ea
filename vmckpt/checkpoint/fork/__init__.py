"""Forks: many VMs from one checkpoint."""
