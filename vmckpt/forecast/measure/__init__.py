"""What a guest and a link are doing now."""
