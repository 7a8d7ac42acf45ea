"""What the steps of a migration do."""
