"""Everyday jobs on top of the three operations: guards."""
