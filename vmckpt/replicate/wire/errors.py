"""Errors of the wire protocol. Each ends the connection; nothing was applied."""

from vmckpt.errors import RefusedError, VmckptError


class WireError(VmckptError):
    """The other side sent something invalid."""


class DamagedFrameError(WireError):
    """Bytes changed in transit, or are missing."""


class StaleTermError(RefusedError):
    """The sender has been replaced: a higher term was granted."""


def damaged(what: str, why: str) -> DamagedFrameError:
    """The error for bytes that changed in transit."""
    return DamagedFrameError(
        what,
        why=why,
        remedy="replication starts again by itself; if it happens again, check the link and the "
        "memory",
    )


def protocol_violation(what: str, why: str) -> WireError:
    """The error for what arrived intact but is not a valid message."""
    return WireError(what, why=why, remedy="report this; install the same vmckpt on both sides")
