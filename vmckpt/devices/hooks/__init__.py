"""Hooks for guests: programs of their own, which import nothing of vmckpt's."""
