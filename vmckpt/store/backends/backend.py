"""The storage backend interface: objects written once, read in parts, and locks.

Object names are `FOLDER/NAME`, or a bare name at the top level.
"""

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from vmckpt.errors import StorageError

Buffer = bytes | bytearray | memoryview
# Objects of these names are created and never replaced, even if locks fail: copies of a checkpoint
# have one id, so two writers may use the same name.
CREATED_ONCE = ("checkpoints/",)


class MissingError(Exception):
    """No object has that name. The caller knows what that means."""


class ObjectWriter(Protocol):
    """An object being written: invisible until it is published."""

    def write(self, data: Buffer) -> None:
        """Append. Raises StorageError (no space left, ...)."""

    def publish(self) -> None:
        """Publish the object under its name, complete and durable on return. Raises StorageError.

        Raises ThereAlreadyError if one of CREATED_ONCE exists already.
        """

    def discard(self) -> None:
        """Remove it without a trace. May be called at any time; after `publish` it does nothing."""


class ReadableBackend(Protocol):
    """A source of objects."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of an object; fewer at its end. Raises MissingError."""

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        """The last bytes of an object, and its total size. Raises MissingError."""


class Backend(ReadableBackend, Protocol):
    """Storage for objects. All methods raise StorageError if the storage fails."""

    location: str
    # Whether a lock ends only with its process; otherwise it may be lost at any instant.
    locks_last: bool
    # Whether each read is a network request, and several may run concurrently.
    is_remote: bool

    def names(self, folder: str) -> dict[str, int]:
        """The objects in a folder (without its name), and their sizes in bytes."""

    def versions(self, folder: str) -> dict[str, tuple[int, str]]:
        """As `names`, with a version for each object that no other object of that name has."""

    def write(self, name: str) -> ObjectWriter:
        """Begin a new object, under an unused name."""

    def remove(self, name: str) -> None:
        """Remove an object durably; a missing one is not an error.

        Raises RefusedError if the location is append-only for this client.
        """

    def hold(
        self, name: str, *, shared: bool, wait_s: float = 0.0
    ) -> AbstractContextManager["HeldLock"]:
        """Hold a lock for the block. Raises BusyError if it is not acquired in time.

        It ends with its process, at once or after the time that `BusyError` names.
        """

    def leftovers(self) -> dict[str, int]:
        """What killed writers left, with sizes. Call it only while there are no writers."""

    def close(self) -> None:
        """Release all resources."""


@runtime_checkable
class OwnFolders(Protocol):
    """A location whose folders can be hidden, for example by an empty mount point."""

    def accept_folders(self) -> None:
        """Accept the folders as the store's in their present state. StorageError, and as
        `read_config`.
        """


@runtime_checkable
class Copying(Protocol):
    """A location where an object's content may also be inside other objects (`bundles/`)."""

    def holders(self, name: str) -> list[str]:
        """The objects that had it at the last listing."""

    def unread(self) -> StorageError | None:
        """Why the content of some of those was unknown at the last listing; a retry may succeed."""

    def read_held(self, name: str, holder: str, start: int = 0, length: int | None = None) -> bytes:
        """Part of it, from the given holder. Raises MissingError."""

    def read_held_end(self, name: str, holder: str, length: int) -> tuple[bytes, int]:
        """The end of it and its size, from the given holder. Raises MissingError."""


class ObjectCopy:
    """An object, as stored by one of its holders."""

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
        """Raises OperationFailedError if it was lost (the storage did not hear from us for
        long).
        """
