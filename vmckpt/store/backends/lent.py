"""A store in a directory of another machine: each question goes to a process there, over a stream.

A message, either way: its length and that of the bytes after it (two u32), JSON, the bytes. The far
side (`lend`) does to its directory what it is asked, in order, until the stream ends: then what it
holds for us is let go of, and what was in the making is discarded. Contents travel as they lie
there: sealed, if the store is encrypted, and the far side never has its key.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from vmckpt import errors
from vmckpt.errors import (
    BusyError,
    OperationFailedError,
    StorageError,
    UsageError,
    VmckptError,
)
from vmckpt.store.backends.backend import Backend, Buffer, MissingError, Writer

_HEAD = struct.Struct("<II")
# Sent at once.
_PIECE_BYTES = 1 << 20
_POLL_S = 0.05


class LentBackend:
    """The near side. `sock` blocks, and is this one's from now on."""

    def __init__(self, sock: socket.socket, place: str) -> None:
        self.place = place
        self._sock, self._mutex = sock, threading.Lock()

    def names(self, folder: str) -> dict[str, int]:
        """The objects in a folder."""
        found: dict[str, int] = self._ask("names", folder)[0]
        return found

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Part of an object."""
        return self._ask("read", name, start, length)[1]

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        """The end of an object."""
        size, data = self._ask("read_end", name, length)
        return data, size

    def write(self, name: str) -> "LentWriter":
        """A new object; the far side has it in the making."""
        return LentWriter(self, self._ask("write", name)[0])

    def remove(self, name: str) -> None:
        """The object is gone."""
        self._ask("remove", name)

    @contextmanager
    def hold(self, name: str, *, shared: bool, wait_s: float = 0.0) -> Iterator["LentHeld"]:
        """A lock that the far side's process has: it goes with the stream."""
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

    def leftovers(self) -> dict[str, int]:
        """Objects in the making, of the killed."""
        found: dict[str, int] = self._ask("leftovers")[0]
        return found

    def close(self) -> None:
        """End the stream."""
        self._sock.close()

    def _ask(self, question: str, *words: Any, data: Buffer = b"") -> tuple[Any, bytes]:
        with self._mutex:
            try:
                _send(self._sock, [question, *words], data)
                answer, came = _receive(self._sock)
            except (OSError, EOFError, ValueError) as exc:
                raise StorageError(
                    f"the store {self.place} does not answer",
                    why=str(exc) or "the connection to its host has ended",
                    remedy="ask again; what had begun there was undone",
                ) from exc
            except BaseException:
                # An answer may be on its way still, which would be taken for the next one's.
                self._sock.close()
                raise
        match answer:
            case {"missing": name}:
                raise MissingError(name)
            case {"error": [name, what, why, remedy]}:
                raise getattr(errors, name)(what, why=why, remedy=remedy)
            case _:
                return answer["is"], came


class LentWriter:
    """An object in the making, on the far side."""

    def __init__(self, backend: LentBackend, number: int) -> None:
        self._backend, self._number, self._over = backend, number, False

    def write(self, data: Buffer) -> None:
        """Append."""
        view = memoryview(data).cast("B")
        for at in range(0, len(view), _PIECE_BYTES):
            self._backend._ask("append", self._number, data=view[at : at + _PIECE_BYTES])

    def publish(self) -> None:
        """It is there."""
        self._backend._ask("publish", self._number)
        self._over = True

    def discard(self) -> None:
        """Nothing of it stays."""
        if not self._over:
            self._over = True
            with suppress(StorageError):  # the stream has ended: it was discarded there
                self._backend._ask("discard", self._number)


class LentHeld:
    """A lock that lasts as long as the stream."""

    def __init__(self, backend: LentBackend) -> None:
        self._backend = backend

    def require(self) -> None:
        """Raises OperationFailedError when the far side does not answer any more."""
        try:
            self._backend._ask("here")
        except StorageError as exc:
            raise OperationFailedError(exc.what, why=exc.why, remedy=exc.remedy) from exc


def lend(backend: Backend, sock: socket.socket) -> None:
    """The far side: do what is asked until the stream ends. Nothing of it is left half done."""
    with ExitStack() as stack:
        far = _Far(backend, stack)
        while True:
            try:
                (question, *words), data = _receive(sock)
            except (OSError, EOFError):
                return
            is_, came = far.answer(question, words, data)
            try:
                _send(sock, is_, came)
            except OSError:
                return


class _Far:
    """What the far side has in hand for the near one."""

    def __init__(self, backend: Backend, stack: ExitStack) -> None:
        self._backend, self._stack = backend, stack
        self._writers: dict[int, Writer] = {}
        self._locks: dict[int, ExitStack] = {}
        self._next = 0

    def answer(self, question: str, words: list[Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            found, came = self._looked(question, words) or (self._done(question, words, data), b"")
        except MissingError as exc:
            return {"missing": str(exc)}, b""
        except VmckptError as exc:
            known = next(one for one in type(exc).__mro__ if hasattr(errors, one.__name__))
            return {"error": [known.__name__, exc.what, exc.why, exc.remedy]}, b""
        return {"is": found}, came

    def _looked(self, question: str, words: list[Any]) -> tuple[Any, bytes] | None:
        """The answer to a question that changes nothing; None: it is none."""
        match question, words:
            case "read", [name, start, length]:
                return None, self._backend.read(name, start, length)
            case "read_end", [name, length]:
                end, size = self._backend.read_end(name, length)
                return size, end
            case "names", [folder]:
                return self._backend.names(folder), b""
            case "leftovers", []:
                return self._backend.leftovers(), b""
            case "here", []:
                return None, b""
        return None

    def _done(self, question: str, words: list[Any], data: bytes) -> int | None:
        """The number of what was begun by it."""
        match question, words:
            case "write", [name]:
                writer = self._backend.write(name)
                self._stack.callback(writer.discard)
                return self._numbered(self._writers, writer)
            case "append", [number]:
                self._writers[number].write(data)
            case "publish", [number]:
                self._writers[number].publish()
            case "discard", [number]:
                self._writers[number].discard()
            case "remove", [name]:
                self._backend.remove(name)
            case "hold", [name, shared]:
                lock = self._stack.enter_context(ExitStack())
                lock.enter_context(self._backend.hold(name, shared=shared))
                return self._numbered(self._locks, lock)
            case "let_go", [number]:
                self._locks.pop(number).close()
            case _:
                raise UsageError(
                    f"a store knows no question '{question}'",
                    why="the other side is another version of vmckpt",
                    remedy="use the same version on both hosts",
                )
        return None

    def _numbered(self, known: dict[int, Any], one: Any) -> int:
        self._next += 1
        known[self._next] = one
        return self._next


def _send(sock: socket.socket, words: Any, data: Buffer) -> None:
    text = json.dumps(words).encode()
    sock.sendall(_HEAD.pack(len(text), len(data)) + text)
    if len(data):
        sock.sendall(data)


def _receive(sock: socket.socket) -> tuple[Any, bytes]:
    """Raises EOFError, OSError."""
    text, data = _HEAD.unpack(_exactly(sock, _HEAD.size))
    return json.loads(_exactly(sock, text)), bytes(_exactly(sock, data))


def _exactly(sock: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError("the connection to its host has ended")
        view = view[got:]
    return buffer
