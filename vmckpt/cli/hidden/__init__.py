"""The commands that vmckpt starts itself, on this host and others: not in --help."""
