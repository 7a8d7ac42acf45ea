"""The command line: a module per command; parses, calls, prints; imports late what is costly."""
