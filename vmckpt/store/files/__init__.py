"""The files of a store: what is in each, byte by byte."""
