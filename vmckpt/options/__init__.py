"""The options of each operation, each declared once."""
