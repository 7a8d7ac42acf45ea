"""Live migration: the VM runs on exactly one host, whatever fails."""
