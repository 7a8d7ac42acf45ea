"""Sockets of a host; the heartbeats of its guests."""
