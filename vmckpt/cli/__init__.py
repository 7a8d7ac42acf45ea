"""The command line: one file per noun; parses, calls, prints. Costly imports wait for their command."""
