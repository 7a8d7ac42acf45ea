"""What commands take: options and arguments, each declared once, and their checks."""
