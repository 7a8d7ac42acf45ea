"""Hooks for guests: separate programs, which import nothing of vmckpt's."""
