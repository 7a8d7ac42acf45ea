"""The catalogue: checkpoints in all stores, their VMs, and retention."""
