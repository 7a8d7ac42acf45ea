"""How a host's address stands in a URI."""


def in_uri(address: str) -> str:
    """The address, in brackets if it has colons of its own (IPv6). Pure."""
    return f"[{address}]" if ":" in address else address
