"""Sockets of a host, and what is heard over them."""
