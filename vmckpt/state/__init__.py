"""State that survives a crash: files replaced atomically, typed and versioned records in them."""
