"""Small packs, merged: a store of thousands of small checkpoints has few objects."""
