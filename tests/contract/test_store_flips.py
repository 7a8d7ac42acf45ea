"""Bits flip in stores of three kinds of place while these are used: see tests/store_flips.py."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.object_storage import environment, new_place, s3_server
from tests.store_flips import Flipping, Put
from vmckpt.checkpoint.place import lent
from vmckpt.hosts.local import LocalHost
from vmckpt.store.backends.lent import LentBackend
from vmckpt.store.backends.s3 import S3Backend
from vmckpt.store.open import create_store, open_store
from vmckpt.store.store import Store

FEW_FLIPS, MANY_FLIPS = 2, 1000


@contextmanager
def directory(folder: Path, _: pytest.MonkeyPatch) -> "Iterator[tuple[Callable[[], Store], Put]]":
    """A directory of this machine."""
    place = folder / "store"
    create_store(str(place)).close()
    yield lambda: open_store(str(place)), in_files(place)


@contextmanager
def of_another_host(
    folder: Path, _: pytest.MonkeyPatch
) -> "Iterator[tuple[Callable[[], Store], Put]]":
    """A directory that another host lends."""
    place = folder / "store"
    create_store(str(place)).close()
    host = LocalHost("there", folder / "state", "127.0.0.1")

    def reopen() -> Store:
        return open_store(LentBackend(asyncio.run(lent(host, str(place))), f"there:{place}"))

    yield reopen, in_files(place)


@contextmanager
def object_storage(
    folder: Path, patch: pytest.MonkeyPatch
) -> "Iterator[tuple[Callable[[], Store], Put]]":
    """An S3 server."""
    with s3_server(folder) as url:
        for name, value in environment(url).items():
            patch.setenv(name, value)
        place = new_place()
        create_store(place).close()
        yield lambda: open_store(place), S3Backend(place).put


def in_files(place: Path) -> Put:
    """Other bytes in the place of a file's."""

    def put(name: str, data: bytes) -> None:
        (place / name).write_bytes(data)

    return put


PLACES = [directory, of_another_host, object_storage]


@pytest.mark.parametrize("place", PLACES)
def test_what_check_calls_whole_restores_and_puts_heal(
    place: object, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_many(place, short_path, monkeypatch, FEW_FLIPS)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("place", PLACES)
def test_three_thousand_flips_in_three_kinds_of_place(
    place: object, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_many(place, short_path, monkeypatch, MANY_FLIPS)


def flip_many(place: object, folder: Path, patch: pytest.MonkeyPatch, flips: int) -> None:
    """Flips in a place, and the counts of what came of them on stdout."""
    assert callable(place)
    with (
        place(folder, patch) as (reopen, put),
        create_store(str(folder / "mirror")) as mirror,
    ):
        flipping = Flipping(reopen, mirror, put, seed=1)
        try:
            flipping.run(flips)
        finally:
            print(getattr(place, "__name__", place), dict(flipping.counts))
