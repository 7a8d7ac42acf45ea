"""Terms and leases: which host may run a VM, and until when."""
