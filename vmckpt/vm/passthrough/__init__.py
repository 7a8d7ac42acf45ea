"""Devices of a host's that a guest has to itself."""
