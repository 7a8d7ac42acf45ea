"""Object storage whose client may not delete, and buckets with object lock."""

import secrets
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from tests.guest_like import memory, require_same, save
from tests.object_storage import (
    environment,
    make_locked_bucket,
    new_location,
    s3_server,
    versions,
)
from tests.restricted_s3 import MAY_NOT_DELETE
from tests.small_packs import make_small, require_one
from vmckpt.errors import BusyError, RefusedError
from vmckpt.store.backends.s3 import S3Backend
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.files.config import allow_bundles
from vmckpt.store.keyring import rotate_key
from vmckpt.store.open import create_store, open_store
from vmckpt.store.sealing.keys import KeyHolder, KeySource, make_key_file
from vmckpt.store.transaction import Transaction

PAGES = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3"), "tests.restricted_s3") as url:
        yield url


@pytest.fixture
def _owner(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def location(_owner: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store that its owner has made; from then on it is used by one who may not delete."""
    location = new_location()
    create_store(location).close()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", MAY_NOT_DELETE)
    return location


def test_checkpoints_are_added_one_after_the_other(location: str) -> None:
    with open_store(location) as store:
        # A lock that could not be removed would hold the next one up for two minutes.
        made = [save(store, memory(PAGES, seed)) for seed in range(3)]
        for seed, manifest in enumerate(made):
            require_same(store, manifest, memory(PAGES, seed))
        assert check(store).whole


def test_a_lock_that_is_held_still_keeps_others_out(location: str) -> None:
    backend = S3Backend(location)
    with backend.hold("one", shared=False), pytest.raises(BusyError):
        backend.hold("one", shared=False).__enter__()
    with backend.hold("one", shared=False):
        pass
    taken = threading.Event()

    def take() -> None:
        with backend.hold("one", shared=False, wait_s=30):
            taken.set()

    with backend.hold("one", shared=True), backend.hold("one", shared=True):
        other = threading.Thread(target=take)
        other.start()
        assert not taken.wait(0.3)
    other.join()
    assert taken.is_set()


def test_locks_that_could_not_be_removed_go_with_the_next_client_that_may(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        with S3Backend(location).hold("one", shared=False):
            pass
    backend = S3Backend(location)
    folder = f"locks/{sha256(b'one').hexdigest()[:24]}"
    assert len(backend.names(folder)) == 3
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    with S3Backend(location).hold("one", shared=False):
        pass
    assert not backend.names(folder)


def test_nothing_is_removed(location: str) -> None:
    with open_store(location) as store:
        manifest = save(store, memory(PAGES, 1))
        with pytest.raises(RefusedError, match="is not changed"):
            store.remove([manifest.id])
        with pytest.raises(RefusedError, match="is not changed"):
            store.opened.backend.remove(f"checkpoints/{manifest.id}")
        require_same(store, manifest, memory(PAGES, 1))


def test_nothing_is_merged(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(location) as store:
        made = make_small(store, 17)
        allow_bundles(store.opened.backend)
    with open_store(location) as store:
        assert plan_gc(store).merges
        assert collect(store, plan_gc(store)).bundles == 0
        assert not store.opened.backend.names("bundles")
        require_one(store, *made[-1])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    with open_store(location) as store:
        assert collect(store, plan_gc(store)).bundles == 1
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", MAY_NOT_DELETE)
    with open_store(location) as store:
        store.begin("vm", made[-1].manifest.id).abort()
        require_one(store, *made[-1])


def test_what_a_failed_checkpoint_leaves_is_the_owners_to_collect(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RefusedError("it fails", why="a test", remedy="-")

    with open_store(location) as store, monkeypatch.context() as patch:
        patch.setattr(Transaction, "_maps", fails)
        with pytest.raises(RefusedError, match="it fails"):
            save(store, memory(PAGES, 2))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    with open_store(location) as store:
        assert plan_gc(store).dead
        collect(store, plan_gc(store))
        assert not plan_gc(store).dead


@pytest.mark.usefixtures("_owner")
def test_keys_come_and_go_in_object_storage_too(tmp_path: Path) -> None:
    keys = []
    for name in ("one", "two"):
        make_key_file(tmp_path / name)
        keys.append(KeySource(KeyHolder.FILE, str(tmp_path / name)))
    location = new_location()
    with create_store(location, keys[0]) as store:
        manifest = save(store, memory(PAGES, 1))
        rotate_key(store.opened.backend, keys[0], keys[1], "")
    with pytest.raises(RefusedError, match="does not open"):
        open_store(location, keys[0])
    S3Backend(location).remove("store")
    with open_store(location, keys[1]) as store:
        require_same(store, manifest, memory(PAGES, 1))
        assert [one.name for one in check(store).findings] == ["store"]
        assert check(store).whole


def test_a_bucket_with_object_lock(server: str, _owner: None) -> None:
    bucket = f"locked-{secrets.token_hex(4)}"
    make_locked_bucket(server, bucket)
    with create_store(f"s3://{bucket}/store") as store:
        first = save(store, memory(PAGES, 1))
        second = save(store, memory(PAGES, 2))
        store.remove([first.id])
        collect(store, plan_gc(store))
        require_same(store, second, memory(PAGES, 2))
        assert check(store).whole
        assert [one.id for one in store.manifests()] == [second.id]
    # What was removed is still a version that its owner can bring back.
    assert f"store/checkpoints/{first.id}" in versions(server, bucket)
