"""What outlives a crash: files replaced in one step, and typed, versioned records in them."""
