"""Arithmetic: numbers in, forecasts and decisions out. Knows no VM, no QEMU, no clock."""
