"""Commands that are one verb: one module each."""
