"""What an operation tells while it runs, the record it leaves, and files that outlive a crash."""
