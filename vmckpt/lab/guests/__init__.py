"""The lab's test guests, and what they say."""
