"""Users of their own for the QEMUs of VMs."""
