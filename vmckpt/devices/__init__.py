"""Passthrough devices on their way with a VM: hooks in the guest, unplug, plug, and back."""
