"""Checks of a host, with the shell commands that fix what they find."""
