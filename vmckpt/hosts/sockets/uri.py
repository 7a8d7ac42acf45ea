"""A host's address in a URI."""


def in_uri(address: str) -> str:
    """The address, in brackets if it contains colons (IPv6). Pure."""
    return f"[{address}]" if ":" in address else address
