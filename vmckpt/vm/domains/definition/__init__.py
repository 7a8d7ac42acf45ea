"""The XML of a domain: what it says, what a capture needs of it, how it becomes a copy's. Pure."""
