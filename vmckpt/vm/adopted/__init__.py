"""A QEMU that somebody else started as a VM: its command line read, and rewritten for a target."""
