"""Migrate a libvirt domain: libvirt's peer-to-peer migration, watched, steered and settled."""
