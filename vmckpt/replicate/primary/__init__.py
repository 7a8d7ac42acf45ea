"""The primary's service: epoch after epoch, the lease, the claim on the guest."""
