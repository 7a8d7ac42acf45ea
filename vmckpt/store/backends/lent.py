"""A store in a directory of another machine, accessed over a stream to a process there.

The far side may serve untrusted clients (`lend --append-only`): it validates every request, and
knows only the objects of a store.

A message, either way: its length and that of the bytes after it (two u32), JSON, the bytes. The far
side (`lend`) executes requests on its directory, in order, until the stream ends. Then it releases
our locks and discards unfinished objects. Contents travel as stored: sealed if the store is
encrypted, and the far side never has its key.
"""

import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

from vmckpt import errors
from vmckpt.errors import (
    BusyError,
    OperationFailedError,
    StorageError,
    UsageError,
    VmckptError,
)
from vmckpt.store.backends.backend import Backend, Buffer, MissingError, ObjectWriter, OwnFolders
from vmckpt.store.backends.files import append_only_error
from vmckpt.store.backends.local import TEMPORARY
from vmckpt.store.errors import UnreadableError

_HEAD = struct.Struct("<II")
CONFIG = "store"
_FOLDERS = ("bundles", "checkpoints", "config", "damaged", "doomed", "maps", "packs", "pins")
# Only clients that may remove write these: the keys, what gc is about to remove, what it merges.
_NOT_TO_ADD = (CONFIG, "config/", "doomed/", "bundles/")
# A writer's packs are new. Only gc writes a later generation, which replaces a pack.
_NEW_PACK = re.compile(r"packs/[0-9a-f]{32}-0")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Sent in one piece.
_PIECE_BYTES = 1 << 20
_POLL_S = 0.05
# After this long without a byte the other side does not answer; its disk may hang.
ANSWER_S = 300.0
# Limits of our own messages (a request, an answer, the names of a whole folder, an object); larger
# ones are rejected.
_MOST_WORDS_BYTES, _MOST_DATA_BYTES = 1 << 20, 16 << 20
_MOST_NAMES_BYTES, _MOST_OBJECT_BYTES = 1 << 28, 1 << 32
_MOST_AT_ONCE = 1 << 17
_READ_AT_ONCE_BYTES = 1 << 20


class LentBackend:
    """The near side. It owns `sock` from now on."""

    is_remote = False  # one request at a time
    locks_last = True  # requests use the stream that the locks depend on

    def __init__(self, sock: socket.socket, location: str) -> None:
        self.location = location
        self._sock, self._mutex = sock, threading.Lock()
        sock.settimeout(ANSWER_S)

    def names(self, folder: str) -> dict[str, int]:
        """The objects in a folder."""
        return _sizes(self._ask("names", folder, most_words=_MOST_NAMES_BYTES)[0])

    def versions(self, folder: str) -> dict[str, tuple[int, str]]:
        """The objects in a folder. An older version on the far side reports only their sizes."""
        try:
            answer = self._ask("versions", folder, most_words=_MOST_NAMES_BYTES)[0]
        except UsageError:
            return {name: (size, "") for name, size in self.names(folder).items()}
        return _versions(answer)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Part of an object."""
        most = _MOST_OBJECT_BYTES if length is None else length
        return self._ask("read", name, start, length, most_data=most)[1]

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        """The end of an object."""
        size, data = self._ask("read_end", name, length, most_data=length)
        if type(size) is not int:
            raise _no_answer(self.location)
        return data, size

    def write(self, name: str) -> "LentWriter":
        """A new object, held unfinished by the far side."""
        return LentWriter(self, self._ask("write", name)[0])

    def remove(self, name: str) -> None:
        """Remove an object."""
        self._ask("remove", name)

    @contextmanager
    def hold(self, name: str, *, shared: bool, wait_s: float = 0.0) -> Iterator["LentHeld"]:
        """A lock held by the far side's process: it ends with the stream."""
        until_s = time.monotonic() + wait_s
        while True:
            try:
                number = self._ask("hold", name, shared)[0]
                break
            except BusyError:
                if time.monotonic() >= until_s:
                    raise
            time.sleep(_POLL_S)
        try:
            yield LentHeld(self)
        finally:
            with suppress(StorageError):  # the stream has ended, and the lock with it
                self._ask("let_go", number)

    def accept_folders(self) -> None:
        """Mark the store's folders as they are now. An older far side cannot."""
        try:
            self._ask("accept_folders")
        except UsageError:
            return

    def leftovers(self) -> dict[str, int]:
        """Unfinished objects of killed writers."""
        return _sizes(self._ask("leftovers", most_words=_MOST_NAMES_BYTES)[0])

    def close(self) -> None:
        """End the stream."""
        self._sock.close()

    def _ask(
        self,
        question: str,
        *words: Any,
        data: Buffer = b"",
        most_words: int = _MOST_WORDS_BYTES,
        most_data: int = 0,
    ) -> tuple[Any, bytes]:
        with self._mutex:
            try:
                _send(self._sock, [question, *words], data)
                answer, came = _receive(self._sock, most_words, most_data)
            except (OSError, EOFError, ValueError, RecursionError) as exc:
                self._sock.close()  # later bytes answer no request
                raise StorageError(
                    f"the store {self.location} does not answer",
                    why=str(exc) or "the connection to its host has ended",
                    remedy="try again; what had begun there was undone",
                ) from exc
            except BaseException:
                # A late answer would be taken for that to the next request.
                self._sock.close()
                raise
        match answer:
            case {"missing": str(name)}:
                raise MissingError(name)
            case {"error": [str(name), str(what), str(why), str(remedy)]}:
                raise _error_class(name)(what, why=why, remedy=remedy)
            case {"is": found}:
                return found, came
        raise _no_answer(self.location)


class LentWriter:
    """An unfinished object on the far side."""

    def __init__(self, backend: LentBackend, number: int) -> None:
        self._backend, self._number, self._over = backend, number, False

    def write(self, data: Buffer) -> None:
        """Append."""
        view = memoryview(data).cast("B")
        for at in range(0, len(view), _PIECE_BYTES):
            self._backend._ask("append", self._number, data=view[at : at + _PIECE_BYTES])

    def publish(self) -> None:
        """Publish it."""
        self._backend._ask("publish", self._number)
        self._over = True

    def discard(self) -> None:
        """Remove it without a trace."""
        if not self._over:
            self._over = True
            with suppress(StorageError):  # the stream has ended: it was discarded there
                self._backend._ask("discard", self._number)


class LentHeld:
    """A lock that lasts as long as the stream."""

    def __init__(self, backend: LentBackend) -> None:
        self._backend = backend

    def require(self) -> None:
        """Raises OperationFailedError if the far side no longer answers."""
        try:
            self._backend._ask("here")
        except StorageError as exc:
            raise OperationFailedError(exc.what, why=exc.why, remedy=exc.remedy) from exc


class Stream(Protocol):
    """The connection of both sides: a socket, or a pair of pipes."""

    def recv_into(self, buffer: memoryview) -> int:
        """Receive bytes; 0: the stream has ended. Raises OSError."""

    def sendall(self, data: Buffer) -> None:
        """Send all of it. Raises OSError."""


class Pipes:
    """Two file descriptors as a stream: stdin and stdout of a process that sshd started."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing

    def recv_into(self, buffer: memoryview) -> int:
        """Receive bytes."""
        return os.readv(self._reading, [buffer])

    def sendall(self, data: Buffer) -> None:
        """Send all of it."""
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(self._writing, view) :]


def lend(backend: Backend, sock: Stream, *, append_only: bool = False) -> None:
    """The far side: execute requests until the stream ends. Leaves nothing half done.

    With `append_only` the near side may only add the objects of checkpoints; `backend` then removes
    and replaces nothing.
    """
    with ExitStack() as stack:
        far = _Far(backend, stack, append_only=append_only)
        while True:
            try:
                message, data = _receive(sock, _MOST_WORDS_BYTES, _MOST_DATA_BYTES)
                question, *words = message
            except (OSError, EOFError, ValueError, TypeError, RecursionError):
                return  # the stream has ended, or is not ours
            is_, came = far.answer(question, words, data)
            try:
                _send(sock, is_, came)
            except OSError:
                return


class _Far:
    """What the far side holds for the near one."""

    def __init__(self, backend: Backend, stack: ExitStack, *, append_only: bool) -> None:
        self._backend, self._stack, self._append_only = backend, stack, append_only
        self._writers: dict[int, ObjectWriter] = {}
        self._names: dict[int, str] = {}
        self._locks: dict[int, ExitStack] = {}
        self._next = 0

    def answer(self, question: str, words: list[Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            found, came = self._read_only(question, words) or (
                self._done(question, words, data),
                b"",
            )
        except MissingError as exc:
            return {"missing": str(exc)}, b""
        except VmckptError as exc:
            return {"error": [_class_name(exc), exc.what, exc.why, exc.remedy]}, b""
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            return {"error": ["UsageError", f"'{question}' is refused", repr(exc), "-"]}, b""
        return {"is": found}, came

    def _read_only(self, question: str, words: list[Any]) -> tuple[Any, bytes] | None:
        """The answer to a read-only request; None: it is none."""
        match question, words:
            case "read", [str(name), int(start), int() | None as length]:
                return None, self._backend.read(_object(name), start, self._at_most(name, length))
            case "read_end", [str(name), int(length)]:
                end, size = self._backend.read_end(_object(name), length)
                return size, end
            case "names", [str(folder)]:
                return self._backend.names(_folder(folder)), b""
            case "versions", [str(folder)]:
                return self._backend.versions(_folder(folder)), b""
            case "leftovers", []:
                return self._backend.leftovers(), b""
            case "here", []:
                return None, b""
        return None

    def _done(self, question: str, words: list[Any], data: bytes) -> int | None:
        """Execute a request; returns the number of what it began."""
        match question, words:
            case "write", [str(name)]:
                writer = self._backend.write(self._to_write(_object(name)))
                self._stack.callback(writer.discard)
                begun = self._numbered(self._writers, writer)
                self._names[begun] = name
                return begun
            case "append", [int(number)]:
                self._writers[number].write(data)
            case "publish", [int(number)]:
                self._require_first(self._names[number])
                self._writers[number].publish()
            case "discard", [int(number)]:
                self._writers[number].discard()
            case "accept_folders", []:
                if isinstance(self._backend, OwnFolders):
                    self._backend.accept_folders()
            case "remove", [str(name)]:
                self._backend.remove(_leftover(name) or _object(name))
            case "hold", [str(name), bool(shared)]:
                lock = self._stack.enter_context(ExitStack())
                lock.enter_context(self._backend.hold(name, shared=shared))
                return self._numbered(self._locks, lock)
            case "let_go", [int(number)]:
                self._locks.pop(number).close()
            case _:
                raise UsageError(
                    f"a store knows no question '{question}'",
                    why="the other side is another version of vmckpt",
                    remedy="use the same version on both hosts",
                )
        return None

    def _to_write(self, name: str) -> str:
        replaces = name.startswith("packs/") and not _NEW_PACK.fullmatch(name)
        if self._append_only and (replaces or name.startswith(_NOT_TO_ADD)):
            raise append_only_error(name, self._backend.location)
        return name

    def _require_first(self, name: str) -> None:
        """Raises RefusedError if gc has replaced this pack by a later generation."""
        if self._append_only and name.startswith("packs/"):
            begin = name.removeprefix("packs/").partition("-")[0] + "-"
            if any(one.startswith(begin) for one in self._backend.names("packs")):
                raise append_only_error(name, self._backend.location)

    def _at_most(self, name: str, length: int | None) -> int | None:
        """Memory is allocated for what exists, not for what is requested."""
        if length is None or length <= _READ_AT_ONCE_BYTES:
            return length
        return min(length, self._backend.read_end(name, 0)[1])

    def _numbered(self, known: dict[int, Any], one: Any) -> int:
        if self._next >= _MOST_AT_ONCE:
            raise UsageError(
                "too much was begun over one connection",
                why=f"{_MOST_AT_ONCE} objects and locks",
                remedy="start again",
            )
        self._next += 1
        known[self._next] = one
        return self._next


def _class_name(error: VmckptError) -> str:
    """The name by which the near side knows such an error."""
    if isinstance(error, UnreadableError):
        return UnreadableError.__name__
    return next(one.__name__ for one in type(error).__mro__ if hasattr(errors, one.__name__))


def _error_class(name: str) -> type[VmckptError]:
    if name == UnreadableError.__name__:
        return UnreadableError
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, VmckptError):
        return known
    return StorageError


def _sizes(answer: Any) -> dict[str, int]:
    """Names and sizes from the far side, which may be any program. Raises StorageError."""
    if isinstance(answer, dict) and all(
        isinstance(name, str) and type(size) is int and size >= 0 for name, size in answer.items()
    ):
        return answer
    raise _no_answer("there")


def _versions(answer: Any) -> dict[str, tuple[int, str]]:
    """As `_sizes`, with versions."""
    rows = answer.items() if isinstance(answer, dict) else [("", None)]
    found = dict[str, tuple[int, str]]()
    for name, one in rows:
        match one:
            case [int(size), str(version)] if size >= 0 and isinstance(name, str):
                found[name] = size, version
            case _:
                raise _no_answer("there")
    return found


def _no_answer(location: str) -> StorageError:
    return StorageError(
        f"the store {location} gives an invalid answer",
        why="the other side is not vmckpt, or another version",
        remedy="use the same version of vmckpt on both hosts",
    )


def _object(name: str) -> str:
    """Validate an object's name: it must not be another file of the machine. Raises UsageError."""
    folder, slash, last = name.partition("/")
    if name == CONFIG or (slash and folder in _FOLDERS and _NAME.fullmatch(last)):
        return name
    raise _no_object(name)


def _folder(name: str) -> str:
    if name in _FOLDERS:
        return name
    raise _no_object(name)


def _leftover(name: str) -> str | None:
    """The file of a killed writer in a directory, which gc removes."""
    folder, _, last = name.partition("/")
    return name if folder == TEMPORARY and _NAME.fullmatch(last) else None


def _no_object(name: str) -> UsageError:
    return UsageError(
        f"a store has nothing called {name!r}",
        why="objects are in folders of their own",
        remedy="use the same version of vmckpt on both hosts",
    )


def _send(sock: Stream, words: Any, data: Buffer) -> None:
    text = json.dumps(words).encode()
    sock.sendall(_HEAD.pack(len(text), len(data)) + text)
    if len(data):
        sock.sendall(data)


def _receive(sock: Stream, most_words: int, most_data: int) -> tuple[Any, bytes]:
    """Raises EOFError, OSError, ValueError."""
    text, data = _HEAD.unpack(_exactly(sock, _HEAD.size))
    if text > most_words or data > most_data:
        raise ValueError(f"a message of {text} and {data} bytes")
    return json.loads(_exactly(sock, text)), bytes(_exactly(sock, data))


def _exactly(sock: Stream, count: int) -> bytearray:
    """Memory is allocated for what has arrived, not for what is announced."""
    buffer, come = bytearray(), 0
    while come < count:
        if come == len(buffer):
            buffer += bytes(min(count - come, max(come, _PIECE_BYTES)))
        with memoryview(buffer) as view, view[come:] as rest:
            got = sock.recv_into(rest)
        if not got:
            raise EOFError("the connection to its host has ended")
        come += got
    return buffer
