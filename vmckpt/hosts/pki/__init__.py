"""The hosts' certificate authority (CA) and certificates."""
