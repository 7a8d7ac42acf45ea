"""What is damaged in a store: written down, left out of what is new, found again, healed."""
