"""Emptying a host: where its VMs go, in which order, and back again."""
