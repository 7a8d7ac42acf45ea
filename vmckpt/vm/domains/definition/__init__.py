"""A domain's XML: read, as what a checkpoint needs of it, and rewritten for a copy. Pure."""
