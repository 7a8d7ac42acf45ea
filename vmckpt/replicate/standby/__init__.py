"""The standby's service: follows the primary, and takes over when it dies."""
