"""The primary's service: epochs, the lease, the claim on the guest."""
