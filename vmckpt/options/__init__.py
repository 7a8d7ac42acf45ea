"""What an operation may be asked for, declared once."""
