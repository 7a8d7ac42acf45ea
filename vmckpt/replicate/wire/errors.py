"""What can be wrong with what came over the wire. Each ends the connection; nothing was applied."""

from vmckpt.errors import RefusedError, VmckptError


class WireError(VmckptError):
    """The other side sent what makes no sense here."""


class DamagedFrameError(WireError):
    """Bytes changed on their way, or are missing."""


class StaleTermError(RefusedError):
    """The sender has been replaced: a higher term was granted."""


def damaged(what: str, why: str) -> DamagedFrameError:
    """The error for bytes that changed on their way."""
    return DamagedFrameError(
        what,
        why=why,
        remedy="replication starts again by itself; if it comes again look for a bad link or "
        "memory",
    )


def senseless(what: str, why: str) -> WireError:
    """The error for what is whole, and yet is no message."""
    return WireError(what, why=why, remedy="report this; install the same vmckpt on both sides")
