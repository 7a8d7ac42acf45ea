"""A system user for each VM's QEMU."""
