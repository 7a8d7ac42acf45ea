"""Test hosts on this machine, and a test guest to run on them."""
