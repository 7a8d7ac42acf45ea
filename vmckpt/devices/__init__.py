"""Passthrough devices during a migration: guest hooks, unplug, plug, resume."""
