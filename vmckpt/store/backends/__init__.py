"""Where a store's objects lie: a directory, one file, object storage."""
