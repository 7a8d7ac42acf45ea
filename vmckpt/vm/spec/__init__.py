"""What a VM is: its spec, read and written."""
