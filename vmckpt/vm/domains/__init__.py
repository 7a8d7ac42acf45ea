"""libvirt domains: found, queried and controlled through the host's libvirtd only."""
