"""The command line: one file per noun; parses, calls, prints; imports late what is costly."""
