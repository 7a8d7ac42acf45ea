"""What a replication does otherwise if libvirt has the guest."""
