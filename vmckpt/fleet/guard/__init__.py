"""Guards: a checkpoint before risky work on a VM, and rollback when the work fails."""
