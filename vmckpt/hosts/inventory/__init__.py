"""Which hosts there are, and what their entries say."""
