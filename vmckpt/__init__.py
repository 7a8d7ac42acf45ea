"""Moves, protects and checkpoints whole virtual machines on stock QEMU."""

__version__ = "0.1.0"
