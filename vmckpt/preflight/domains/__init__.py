"""What a migration of a domain of libvirt's is checked for."""
