"""The standby's service: it follows, and goes on with the guest when the primary dies."""
