"""A checkpoint before risky work on a VM, and the way back to it when the work goes wrong."""
