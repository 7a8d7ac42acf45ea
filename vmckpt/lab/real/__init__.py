"""Hosts of the lab that look like machines: with sshd, libvirtd and a root of their own."""
