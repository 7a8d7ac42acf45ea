"""Disk images and the protocol by which QEMU serves them."""
