"""Have libvirt start a domain from a save image that is written while it is read."""
