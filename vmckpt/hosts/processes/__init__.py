"""Processes of a host: start, identity, end, scheduling, memory promises."""
