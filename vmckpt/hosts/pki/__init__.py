"""The hosts' certificate authority and certificates."""
