"""The operator's commands: start, keep, failover, failback, stop, and cleanup afterwards."""
