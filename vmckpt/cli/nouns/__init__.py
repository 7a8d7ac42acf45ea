"""The nouns of the command line, each with verbs of its own: a module or a folder each."""
