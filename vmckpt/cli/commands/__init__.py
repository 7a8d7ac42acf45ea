"""The commands that are one verb: a module each."""
