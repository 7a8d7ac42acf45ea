"""A checkpoint that is taken together with others."""
