"""libvirt domains: found, queried and controlled only through the host's libvirtd."""
