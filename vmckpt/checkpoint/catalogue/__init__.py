"""Which checkpoints there are, in which stores, whose, and which of them stay."""
