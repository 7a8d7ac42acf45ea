"""How a domain's memory and devices come out of a checkpoint into its QEMU."""
