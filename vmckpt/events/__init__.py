"""What an operation tells while it runs, and the record that it leaves."""
