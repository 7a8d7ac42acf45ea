"""Hosts: run commands, reach sockets, keep files and locks there. Knows nothing of VMs."""
