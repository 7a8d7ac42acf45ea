"""Virtual machines: specs, the inventory, and the QEMU that runs each."""
