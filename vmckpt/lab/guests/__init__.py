"""The lab's test guests, and their replies."""
