"""What a store asks of the place it lies in: objects written once, read in parts, and locks.

Object names are `FOLDER/NAME`, or a bare name at the top.
"""

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from vmckpt.errors import StorageError

Buffer = bytes | bytearray | memoryview
# Objects of these names are created and never replaced, whatever became of the locks: copies of a
# checkpoint have one id, so that two writers may come to one name.
CREATED_ONCE = ("checkpoints/",)


class MissingError(Exception):
    """No object of that name. The caller knows what that means."""


class ObjectWriter(Protocol):
    """An object being written: invisible until it is published."""

    def write(self, data: Buffer) -> None:
        """Append. Raises StorageError: no space is left, ..."""

    def publish(self) -> None:
        """It is there under its name, whole and for good, when this returns. StorageError.

        Raises ThereAlreadyError where one of CREATED_ONCE has an object of that name.
        """

    def discard(self) -> None:
        """Nothing of it stays. May be called at any time; after `publish` it does nothing."""


class ReadableBackend(Protocol):
    """A place to read objects from."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of an object; fewer when it ends before. Raises MissingError."""

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        """The last bytes of an object, and the size of all of it. Raises MissingError."""


class Backend(ReadableBackend, Protocol):
    """A place for objects. All raise StorageError when the place does not do what it is asked."""

    place: str
    # Whether a lock goes only with the process that has it. Else it may be lost at any instant.
    locks_last: bool
    # Whether each read takes a request over a network, and several may be under way.
    is_remote: bool

    def names(self, folder: str) -> dict[str, int]:
        """The objects in a folder (without its name), and their sizes in bytes."""

    def versions(self, folder: str) -> dict[str, tuple[int, str]]:
        """The same, and for each object what another one of its name would not have."""

    def write(self, name: str) -> ObjectWriter:
        """Begin a new object, of a name that no object has."""

    def remove(self, name: str) -> None:
        """The object is gone for good when this returns; one that is not there is no error.

        Raises RefusedError where the location lets this client remove nothing (append-only).
        """

    def hold(
        self, name: str, *, shared: bool, wait_s: float = 0.0
    ) -> AbstractContextManager["HeldLock"]:
        """A lock for the block. Raises BusyError when it is not had in time.

        It goes with the process that has it, at once or after a while that `BusyError` names.
        """

    def leftovers(self) -> dict[str, int]:
        """What writers left that were killed, by name, with sizes. Only when there are none now."""

    def close(self) -> None:
        """Let go of what was opened."""


@runtime_checkable
class OwnFolders(Protocol):
    """A place whose folders something else may take the place of: an empty mount point."""

    def accept_folders(self) -> None:
        """They are the store's as they are now. Raises StorageError, and as `read_config`."""


@runtime_checkable
class Copying(Protocol):
    """A place in which an object may be in several others (`bundles/`), while it is moved."""

    def holders(self, name: str) -> list[str]:
        """The objects that had it when they were listed last."""

    def unread(self) -> StorageError | None:
        """Why it was not known then which objects some of those have, and may be later."""

    def read_held(self, name: str, holder: str, start: int = 0, length: int | None = None) -> bytes:
        """Part of it, as one of these has it. Raises MissingError."""

    def read_held_end(self, name: str, holder: str, length: int) -> tuple[bytes, int]:
        """The end of it, as one of these has it, and its size. Raises MissingError."""


class ObjectCopy:
    """An object as one of those that have it has it."""

    def __init__(self, backend: Copying, holder: str) -> None:
        self._backend, self._holder = backend, holder

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Part of it."""
        return self._backend.read_held(name, self._holder, start, length)

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        """Its end, and its size."""
        return self._backend.read_held_end(name, self._holder, length)


class HeldLock(Protocol):
    """A lock that is held."""

    def require(self) -> None:
        """Raises OperationFailedError when it was lost (the place did not hear of us for long)."""
