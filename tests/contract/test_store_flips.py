"""Bits flip in stores of three kinds of place while these are used: see tests/store_flips.py."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from tests.object_storage import environment, new_location, s3_server
from tests.store_flips import Flipping, Put
from vmckpt.checkpoint.catalogue.location import lent
from vmckpt.hosts.local import LocalHost
from vmckpt.store.backends.lent import LentBackend
from vmckpt.store.backends.local import LocalBackend
from vmckpt.store.backends.s3 import S3Backend
from vmckpt.store.bundles import merging
from vmckpt.store.files.config import allow_bundles
from vmckpt.store.open import create_store, open_store
from vmckpt.store.store import Store

FEW_FLIPS = 3
# Starting a process takes longer than all that one command asks of it.
COMMANDS = 20


# What opens the store, what replaces an object of it, and what opens it to look at what is there.
Opening = tuple[Callable[[], Store], Put, Callable[[], Store]]


@contextmanager
def directory(folder: Path, _: pytest.MonkeyPatch) -> Iterator[Opening]:
    """A directory of this machine."""
    location = folder / "store"
    create_store(str(location)).close()
    yield lambda: open_store(str(location)), in_files(location), lambda: open_store(str(location))


@contextmanager
def of_merged_packs(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Opening]:
    """A directory in which every gc merges packs, as few as two."""
    patch.setattr(merging, "MANY", 2)
    with directory(folder, patch) as opening:
        allow_bundles(LocalBackend(folder / "store"))
        yield opening


@contextmanager
def of_another_host(folder: Path, _: pytest.MonkeyPatch) -> Iterator[Opening]:
    """A directory that another host lends."""
    location = folder / "store"
    create_store(str(location)).close()
    host = LocalHost("there", folder / "state", "127.0.0.1")

    with closing(Lending(host, location)) as lending:
        yield lending.reopen, in_files(location), lambda: open_store(str(location))


class Lending:
    """Opens a store that a host lends; the process there serves several commands."""

    def __init__(self, host: LocalHost, location: Path) -> None:
        self._host, self._place = host, location
        self._backend: Kept | None = None
        self._commands = 0

    def reopen(self) -> Store:
        """The store, opened again."""
        if self._backend is None or self._commands % COMMANDS == 0:
            self.close()
            sock = asyncio.run(lent(self._host, str(self._place)))
            self._backend = Kept(sock, f"there:{self._place}")
        self._commands += 1
        return open_store(self._backend)

    def close(self) -> None:
        """End the process."""
        if self._backend is not None:
            self._backend.end()


class Kept(LentBackend):
    """Its stream does not end with a store that it was opened for."""

    def close(self) -> None:
        """Let go of nothing."""

    def end(self) -> None:
        """End the stream."""
        super().close()


@contextmanager
def object_storage(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Opening]:
    """An S3 server."""
    with s3_server(folder) as url:
        for name, value in environment(url).items():
            patch.setenv(name, value)
        location = new_location()
        create_store(location).close()
        yield lambda: open_store(location), S3Backend(location).put, lambda: open_store(location)


def in_files(location: Path) -> Put:
    """Other bytes in the place of a file's."""

    def put(name: str, data: bytes) -> None:
        (location / name).write_bytes(data)

    return put


Place = Callable[[Path, pytest.MonkeyPatch], AbstractContextManager[Opening]]
PLACES: list[Place] = [directory, of_merged_packs, of_another_host, object_storage]
# What a flip costs is as 1 to 1 to 3 to 8 there: 4,500 in all.
MANY_FLIPS: dict[Place, int] = {
    directory: 1500,
    of_merged_packs: 1500,
    of_another_host: 1000,
    object_storage: 500,
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory: everything is written durably, and none of that is what is tried here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="vk-") as path:
        yield Path(path)


@pytest.mark.parametrize("location", PLACES)
def test_what_check_calls_whole_restores_and_puts_heal(
    location: Place, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_many(location, folder, monkeypatch, FEW_FLIPS)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("location", PLACES)
def test_three_thousand_flips_in_three_kinds_of_place(
    location: Place, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_many(location, folder, monkeypatch, MANY_FLIPS[location])


def flip_many(location: Place, folder: Path, patch: pytest.MonkeyPatch, flips: int) -> None:
    """Flips in a place, and the counts of what came of them on stdout."""
    with (
        location(folder, patch) as (reopen, put, look),
        create_store(str(folder / "mirror")) as mirror,
    ):
        flipping = Flipping(reopen, mirror, put, look, seed=5)
        while (done := flipping.counts["flips"]) < flips:
            flipping.run(min(flips, done + 50))
            print(location.__name__, dict(flipping.counts), flush=True)
