"""Adopted VMs: a QEMU started by someone else, its command line parsed and rewritten."""
