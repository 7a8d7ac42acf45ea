"""Where commands part between VMs of vmckpt's own and libvirt's domains: nowhere else."""
