"""Encryption and keys; the only package that imports cryptography and blake3."""
