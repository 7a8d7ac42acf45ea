"""Checkpoints of libvirt domains: taken through libvirt's monitor, exported for libvirt."""
