"""Storage backends: a directory, a single file, object storage."""
