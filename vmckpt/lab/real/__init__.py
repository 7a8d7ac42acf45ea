"""Lab hosts that look like machines: sshd, libvirtd and a root file system each."""
