"""A store in S3-compatible object storage: s3://BUCKET/PREFIX.

Endpoint and credentials come from the usual environment variables: AWS_ENDPOINT_URL,
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ALLOW_HTTP, ...

A lock is an object that its holder rewrites every `refresh_s`. To take a lock, a process writes its
own, then lists all: of two at the same time both may back off, but never both succeed. Ages are by
the storage's clock only. A lock that was not rewritten for `expiry_s` was left by a dead process.
"""

import contextlib
import os
import random
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError
from obstore.store import S3Store

from vmckpt.errors import BusyError, OperationFailedError, RefusedError, StorageError, UsageError
from vmckpt.store.backends.backend import CREATED_ONCE, Buffer, MissingError
from vmckpt.store.backends.files import append_only_error
from vmckpt.store.errors import there_already
from vmckpt.store.files.config import CONFIG
from vmckpt.units import format_size

LOCKS = "locks"
# Content of a lock that could not be removed; a held lock is empty.
_RELEASED = b"let go"
# A request without progress for this long has failed; it is retried.
_TIMEOUT_S = 30
# Kept in memory; larger objects, up to a whole pack, go to a file.
SPOOL_BYTES, MOST_SPOOLED_BYTES = 8 << 20, 160 << 20
_RETRY_S = 60
# Entries in one page of a listing.
_PAGE, _TRIES = 1000, 3


class S3Backend:
    """Objects under a prefix of a bucket."""

    locks_last = False
    is_remote = True

    def __init__(
        self, location: str, *, expiry_s: float = 120.0, refresh_s: float = 20.0, retries: int = 5
    ) -> None:
        bucket, _, prefix = location.removeprefix("s3://").partition("/")
        self.location = location
        self._expiry_s, self._refresh_s = expiry_s, refresh_s
        self._may_remove = True
        allows_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://") and not allows_http:
            raise RefusedError(
                f"{location} is not used unencrypted",
                why="guests' memory would travel without TLS",
                remedy="give an https:// AWS_ENDPOINT_URL, or set AWS_ALLOW_HTTP=true",
            )
        try:
            self._store = S3Store(
                bucket,
                prefix=prefix or None,
                # Buckets with object lock require a checksum.
                config={"checksum_algorithm": "SHA256"},
                client_options={
                    "timeout": f"{_TIMEOUT_S}s",
                    "allow_http": allows_http,
                },
                retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=_RETRY_S)},
            )
        except (BaseError, ValueError) as exc:
            raise UsageError(
                f"'{location}' is not a location of a store",
                why=_first_line(exc),
                remedy="write s3://BUCKET/PREFIX, and set AWS_ENDPOINT_URL and credentials",
            ) from exc

    def names(self, folder: str) -> dict[str, int]:
        """The objects in a folder."""
        return {name: entry["size"] for name, entry in self._list(folder).items()}

    def versions(self, folder: str) -> dict[str, tuple[int, str]]:
        """The objects in a folder: sizes, and the storage's versions."""
        return {
            name: (entry["size"], f"{entry['e_tag']} {entry['last_modified']}")
            for name, entry in self._list(folder).items()
        }

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Part of an object."""
        with self._errors(name):
            if length == 0:
                obstore.head(self._store, name)
                return b""
            if start == 0 and length is None:
                return bytes(obstore.get(self._store, name).bytes())
            size = obstore.head(self._store, name)["size"] if length is None else None
            end = size if size is not None else start + (length or 0)
            try:
                return bytes(obstore.get_range(self._store, name, start=start, end=end))
            except BaseError:
                if obstore.head(self._store, name)["size"] > start:
                    raise
                return b""

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        """The end of an object."""
        with self._errors(name):
            if length == 0:
                return b"", obstore.head(self._store, name)["size"]
            found = obstore.get(self._store, name, options={"range": {"suffix": length}})
            return bytes(found.bytes()), found.meta["size"]

    def write(self, name: str) -> "S3Writer":
        """An object that is buffered here until it is published."""
        return S3Writer(self, name)

    def remove(self, name: str) -> None:
        """Delete it."""
        with contextlib.suppress(MissingError), self._errors(name):
            try:
                obstore.delete(self._store, name)
            except PermissionDeniedError as exc:
                raise append_only_error(name, self.location) from exc

    @contextmanager
    def hold(self, name: str, *, shared: bool, wait_s: float = 0.0) -> Iterator["S3Held"]:
        """An object under locks/, for the block."""
        folder = f"{LOCKS}/{sha256(name.encode()).hexdigest()[:24]}"
        mine = f"{'shared' if shared else 'alone'}-{secrets.token_hex(16)}"
        until_s = time.monotonic() + wait_s
        while not self._take(folder, mine, shared=shared):
            if time.monotonic() >= until_s:
                raise BusyError(
                    f"the store {self.location} is in use",
                    why=f"another command holds its {name}, or did when it died, less than "
                    f"{self._expiry_s:g} s ago",
                    remedy="wait for it to end, then run this again",
                )
            time.sleep(random.uniform(0.05, 0.5))
        held = S3Held(lambda: self.put(f"{folder}/{mine}", b""), self._refresh_s, self._expiry_s)
        try:
            yield held
        finally:
            held.stop()
            # If it cannot be removed now, it expires.
            with contextlib.suppress(StorageError):
                self._release(f"{folder}/{mine}")

    def leftovers(self) -> dict[str, int]:
        """None: uploads are atomic."""
        return {}

    def close(self) -> None:
        """Nothing to close."""

    def put(self, name: str, data: Any) -> None:
        """Put an object: bytes, or an open file from its beginning."""
        with self._errors(name):
            obstore.put(self._store, name, data)

    def create(self, name: str, data: Any) -> None:
        """Create an object under an unused name from an open file. Raises ThereAlreadyError."""
        with self._errors(name):
            try:
                obstore.put(self._store, name, data, mode="create")
            except AlreadyExistsError as exc:
                raise there_already(name.rpartition("/")[2], self.location) from exc

    def _take(self, folder: str, mine: str, *, shared: bool) -> bool:
        self.put(f"{folder}/{mine}", b"")
        got = False
        try:
            entries = self._list(folder)
            now = entries[mine]["last_modified"] if mine in entries else None
            rivals = []
            for name, entry in entries.items():
                if name == mine:
                    continue
                if entry["size"] == len(_RELEASED):
                    self._forget(f"{folder}/{name}")
                    continue
                if now and (now - entry["last_modified"]).total_seconds() > self._expiry_s:
                    self._release(f"{folder}/{name}")
                elif not (shared and name.startswith("shared")):
                    rivals.append(name)
            got = now is not None and not rivals
        finally:
            if not got:
                self._release(f"{folder}/{mine}")
        return got

    def _forget(self, name: str) -> None:
        """Objects left by a client that may not remove are removed by the next one that may."""
        if self._may_remove:
            try:
                self.remove(name)
            except RefusedError:
                self._may_remove = False

    def _release(self, name: str) -> None:
        """Release a lock: remove it, or mark it if this client may not remove."""
        try:
            self.remove(name)
        except RefusedError:
            self.put(name, _RELEASED)

    def _list(self, folder: str) -> dict[str, Any]:
        start = f"{folder}/"
        with self._errors(folder):
            for _ in range(_TRIES):
                found = [entry for part in obstore.list(self._store, folder) for entry in part]
                if self._is_whole(start, found):
                    break
            else:
                raise self._error(folder, "its answer is not a list of objects")
        return {
            entry["path"].removeprefix(start): entry
            for entry in found
            if "/" not in entry["path"].removeprefix(start)
        }

    def _is_whole(self, start: str, found: list[Any]) -> bool:
        """Whether a listing is complete.

        Any other XML answer, such as an error or a maintenance page, would parse as an empty list
        or last page, and gc removes what nothing needs. A later entry in the bucket proves the end:
        at least the config, whose name sorts last.
        """
        if len(found) % _PAGE:
            return True
        last = max((entry["path"] for entry in found), default=start)
        after = next(iter(obstore.list(self._store, offset=last)), [])
        if after:
            return not any(entry["path"].startswith(start) for entry in after)
        try:
            obstore.head(self._store, CONFIG)
        except FileNotFoundError:
            return True  # no store there
        return False

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as exc:
            if "NoSuchBucket" in str(exc):
                raise self._error(name, "there is no such bucket") from exc
            raise MissingError(name) from exc
        except (BaseError, OSError) as exc:
            raise self._error(name, _first_line(exc)) from exc

    def _error(self, name: str, why: str) -> StorageError:
        return StorageError(
            f"cannot use {name} in {self.location}",
            why=why,
            remedy="nothing that was in the store is harmed: check the bucket, AWS_ENDPOINT_URL "
            "and the credentials",
        )


class S3Writer:
    """An unfinished object: in memory, a larger one in a temporary file. None is larger than a pack
    (`pack.MOST_BYTES`).
    """

    def __init__(self, backend: S3Backend, name: str) -> None:
        self._backend, self._name = backend, name
        self._file = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115
        self._size_bytes = 0

    def write(self, data: Buffer) -> None:
        """Append."""
        before, self._size_bytes = (
            self._size_bytes,
            self._size_bytes + len(memoryview(data).cast("B")),
        )
        try:
            if before <= SPOOL_BYTES < self._size_bytes:
                free = shutil.disk_usage(tempfile.gettempdir()).free
                if free < MOST_SPOOLED_BYTES:
                    raise self._no_room(f"{format_size(free)} are free")
            self._file.write(data)
        except OSError as exc:
            raise self._no_room(exc.strerror or str(exc)) from exc

    def _no_room(self, why: str) -> StorageError:
        return StorageError(
            f"cannot write the replacement of {self._name}",
            why=why,
            remedy=f"make room in {tempfile.gettempdir()}, or set TMPDIR to a directory that has "
            f"{format_size(2 * MOST_SPOOLED_BYTES)}",
        )

    def publish(self) -> None:
        """Upload it, atomically."""
        self._file.seek(0)
        put = self._backend.put
        if self._name.startswith(CREATED_ONCE):
            put = self._backend.create
        put(self._name, self._file)
        self.discard()

    def discard(self) -> None:
        """Close the file."""
        self._file.close()


class S3Held:
    """A lock that is rewritten until `stop`, or until another process may have taken it.

    From then on it is lost for good: a process that considered its holder dead has done what the
    lock prevented.
    """

    def __init__(self, refresh: Callable[[], None], every_s: float, expiry_s: float) -> None:
        self._refresh, self._every_s, self._expiry_s = refresh, every_s, expiry_s
        self._fresh_s, self._lost = boottime_s(), False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store lock", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Raises OperationFailedError if others may soon consider its holder dead."""
        if self._is_lost():
            raise OperationFailedError(
                "a lock in the store was lost",
                why="the object storage could not be reached for too long, or this host slept",
                remedy="run this again",
            )

    def stop(self) -> None:
        """Stop rewriting it."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not (self._is_lost() or self._over.wait(self._every_s) or self._is_lost()):
            began_s = boottime_s()
            with contextlib.suppress(StorageError):
                self._refresh()
                if not self._is_lost():
                    self._fresh_s = began_s

    def _is_lost(self) -> bool:
        """Whether others may consider its holder dead, now or soon."""
        self._lost |= boottime_s() - self._fresh_s > self._expiry_s / 2
        return self._lost


def boottime_s() -> float:
    """Seconds since this host booted, including sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _first_line(exc: BaseException) -> str:
    return str(exc).partition("\n")[0]
