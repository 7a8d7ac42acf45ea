"""What is done to all commands at once."""
