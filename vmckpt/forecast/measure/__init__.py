"""What a guest and a link are currently doing."""
