"""Moving a libvirt domain: libvirt's own peer-to-peer migration, watched, steered and settled."""
