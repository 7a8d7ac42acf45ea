"""Seals and keys. Only here cryptography and blake3 are imported."""
