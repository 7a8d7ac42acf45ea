"""Continuous replication: a standby that takes over within milliseconds."""
