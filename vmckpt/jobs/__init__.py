"""Jobs: work on a VM's host that outlives the command that asked for it (README.md)."""
