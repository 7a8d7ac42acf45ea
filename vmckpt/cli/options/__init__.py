"""Options and arguments shared by commands, each declared once, and their checks."""
