"""What a migration of a VM of vmckpt's own is checked for."""
