"""Virtual machines: what they are (specs), where they are (inventory), and the QEMU that runs them."""
