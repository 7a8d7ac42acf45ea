"""What can be wrong with a store itself."""

from vmckpt.errors import RefusedError, StorageError


class DamagedError(StorageError):
    """Bytes in the store are missing, or differ from those written."""

    kind = "damaged"


class UnreadableError(DamagedError):
    """A disk cannot read bytes of an object now, or this machine lacks the memory.

    They may be intact and readable later: what depends on them is neither removed nor given up.
    """


class ThereAlreadyError(RefusedError):
    """The checkpoint is already in the store: another writer was faster."""


def there_already(checkpoint_id: str, location: str) -> ThereAlreadyError:
    """The error for a checkpoint that another writer stored first."""
    return ThereAlreadyError(
        f"checkpoint {checkpoint_id} is in the store {location} already",
        why="another command has put it there meanwhile",
        remedy="there is nothing to do: see `vmckpt checkpoint show`",
    )


def damaged(what: str, why: str) -> DamagedError:
    """The error for bytes that differ from those written."""
    return DamagedError(
        what,
        why=why,
        remedy="`vmckpt store check` says which checkpoints are affected; the others are intact",
    )


def too_large(name: str, why: str) -> UnreadableError:
    """The error for data that takes more memory than this machine has."""
    return UnreadableError(
        f"{name} cannot be read here", why=why, remedy="read it on a machine with more memory"
    )
