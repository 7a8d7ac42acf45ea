"""Commands that are a noun with verbs: one module or folder each."""
