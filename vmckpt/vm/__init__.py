"""Virtual machines: what they are (specs), where (inventory), and the QEMU that runs them."""
