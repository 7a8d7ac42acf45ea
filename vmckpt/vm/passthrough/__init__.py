"""Host devices assigned to a guest."""
