"""The inventory: the hosts and their entries."""
