"""What a replication is checked for."""
