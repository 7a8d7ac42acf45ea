"""The file formats of a store, byte by byte."""
