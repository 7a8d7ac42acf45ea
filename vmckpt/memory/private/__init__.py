"""Memory that a QEMU has alone: no other process can map it."""
