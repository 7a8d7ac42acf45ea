"""How much is asked of object storage: in proportion to what is new, not to what is there."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest_like import dirtied, memory, require_same, save
from tests.lossy_http import Losses, lossy_proxy
from tests.object_storage import environment, new_location, s3_server
from vmckpt.checkpoint.catalogue.catalogue import catalogue
from vmckpt.checkpoint.catalogue.maintain import verify
from vmckpt.errors import NotFoundError
from vmckpt.store.backends.s3 import S3Backend
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.open import create_store, open_store

PAGES = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Losses]]:
    """Counts requests; none is lost."""
    counts = Losses(1, 0.0)
    with (
        s3_server(tmp_path_factory.mktemp("s3")) as url,
        lossy_proxy(int(url.rpartition(":")[2]), counts) as proxy,
    ):
        yield proxy, counts


@pytest.fixture
def asked(server: tuple[str, Losses], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Losses:
    monkeypatch.setenv("VMCKPT_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in environment(server[0]).items():
        monkeypatch.setenv(name, value)
    return server[1]


@pytest.mark.parametrize("count", [9, pytest.param(200, marks=pytest.mark.long)])
def test_a_checkpoint_asks_for_what_is_new(asked: Losses, tmp_path: Path, count: int) -> None:
    """Each by a command of its own."""
    location, counts, ram = new_location(), list[int](), memory(PAGES, 1)
    create_store(location).close()
    last: Manifest | None = None
    for number in range(count):
        before = asked.requests
        ram, dirty = dirtied(ram, 4, number)
        with open_store(location) as store:
            last = save(store, ram, parent=last, dirty=dirty if last else None)
        counts.append(asked.requests - before)
    # A new base for the maps now and then.
    assert counts[-1] <= counts[3] + 8, counts
    assert max(counts) < 80, counts
    # All of it may go at any time; what was changed is read again.
    files = [one for one in (tmp_path / "cache").rglob("*") if one.is_file()]
    assert files
    for number, one in enumerate(files):
        data = one.read_bytes()
        one.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if number % 2 else b"")
    with open_store(location) as store:
        assert len(store.manifests()) == count
        assert last is not None
        require_same(store, last, ram)


def test_what_was_removed_elsewhere_is_not_found_here(asked: Losses) -> None:
    location = new_location()
    create_store(location).close()
    with open_store(location) as one, open_store(location) as other:
        first, second = (save(one, memory(PAGES, seed)) for seed in (1, 2))
        assert [m.id for m in other.manifests()] == [first.id, second.id]
        one.remove([first.id])
        with pytest.raises(NotFoundError):
            other.manifest(first.id)
        with pytest.raises(NotFoundError), other.read(first.id):
            pass
        assert [m.id for m in other.manifests()] == [second.id]
        collect(one, plan_gc(one))
        require_same(other, second, memory(PAGES, 2))
    assert asked.requests


def test_a_check_reads_the_storage_and_not_what_is_kept_here(asked: Losses) -> None:
    location = new_location()
    create_store(location).close()
    with open_store(location) as store:
        save(store, memory(PAGES, 1))
        store.manifests()
        assert check(store).whole
        backend = S3Backend(location)
        [name] = backend.names("checkpoints")
        data = backend.read(f"checkpoints/{name}")
        backend.put(f"checkpoints/{name}", data[:-1] + bytes([data[-1] ^ 1]))
        assert not check(store).whole
    assert asked.requests


def test_a_checkpoint_is_verified_where_it_lies(
    asked: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has rotted there without a word is found, although it is kept here whole."""
    location = new_location()
    create_store(location).close()
    with open_store(location) as store:
        made = save(store, memory(PAGES, 1))
        store.manifests()
    [entry] = asyncio.run(catalogue([], location)).entries
    assert asyncio.run(verify(entry))
    right = S3Backend.read

    def rotten(self: S3Backend, name: str, start: int = 0, length: int | None = None) -> bytes:
        data = right(self, name, start, length)
        return data[:-1] + bytes([data[-1] ^ 1]) if name == f"checkpoints/{made.id}" else data

    monkeypatch.setattr(S3Backend, "read", rotten)
    with pytest.raises(DamagedError):
        asyncio.run(verify(entry))


def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path, asked: Losses) -> None:
    location = new_location()
    with create_store(location) as store:
        folder = tmp_path / "cache" / "vmckpt" / "stores" / store.config.id
    folder.chmod(0o777)
    with open_store(location) as store:
        save(store, memory(PAGES, 1))
        store.manifests()
    assert not list(folder.iterdir())
    assert asked.requests
