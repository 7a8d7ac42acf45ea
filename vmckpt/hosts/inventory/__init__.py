"""The inventory: which hosts there are, and their entries."""
