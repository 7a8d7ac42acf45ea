"""Epochs: the state of a running VM, captured from outside QEMU up to 40 times a second."""
