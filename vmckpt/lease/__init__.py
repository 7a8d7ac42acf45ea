"""Who may run a VM, and until when: terms that only grow, leases that end by everybody's clock."""
