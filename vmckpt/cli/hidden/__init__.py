"""Commands that vmckpt starts itself, here and on other hosts; not in --help."""
