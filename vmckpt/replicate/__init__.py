"""Continuous replication: a standby that goes on with the guest within milliseconds."""
