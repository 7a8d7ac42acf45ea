"""Placement, order and duration of the moves that drain a host. Pure."""
