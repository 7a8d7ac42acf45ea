"""The steps of a migration."""
