"""What a plan is for: a VM of vmckpt's own, or a libvirt domain."""
