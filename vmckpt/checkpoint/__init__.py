"""Points in time of a VM that it can return to."""
