"""libvirt domains that become VMs of vmckpt's own, and the way back."""
