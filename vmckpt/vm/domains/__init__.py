"""libvirt's domains: found, looked at and acted on through a host's libvirtd, never behind it."""
