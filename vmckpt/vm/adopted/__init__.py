"""A QEMU started by someone else, as a VM: its command line parsed, and rewritten for a target."""
