"""Object storage that answers oddly: nothing is lost, and nothing is called done that is not."""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest

from tests.guest_like import memory, require_same, save
from tests.lossy_http import Answer, Losses, lossy_proxy
from tests.object_storage import environment, new_location, s3_server
from vmckpt.errors import StorageError, VmckptError
from vmckpt.store.backends import s3
from vmckpt.store.backends.s3 import S3Backend
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.damage.repair import plan_repair, repair
from vmckpt.store.errors import ThereAlreadyError
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.files.pins import new_pin
from vmckpt.store.open import create_store, open_store
from vmckpt.store.store import Store
from vmckpt.store.transaction import Origin, new_id

RAM = memory(64, 1)
ERROR = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>again</Message></Error>"
PAGE = b"<html><head><title>Maintenance</title></head><body>Back soon</body></html>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Losses]]:
    losses = Losses(1, 0.0)
    with (
        s3_server(tmp_path_factory.mktemp("s3")) as url,
        lossy_proxy(int(url.rpartition(":")[2]), losses) as proxy,
    ):
        yield proxy, losses


@pytest.fixture
def odd(
    server: tuple[str, Losses],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Losses]:
    monkeypatch.setenv("VMCKPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    for name, value in environment(server[0]).items():
        monkeypatch.setenv(name, value)
    yield server[1]
    server[1].twist = Losses.twist


@pytest.fixture
def made(odd: Losses) -> tuple[str, Manifest]:
    location = new_location()
    with create_store(location) as store:
        return location, save(store, RAM)


def is_list(method: str, path: str, folder: str) -> bool:
    return method == "GET" and "list-type=2" in path and f"%2F{folder}%2F" in path


def test_what_is_no_list_is_not_taken_for_an_empty_one(
    odd: Losses, made: tuple[str, Manifest]
) -> None:
    """Nothing would be needed then, or pinned, and gc, `rm` and `repair` would remove it."""
    location, manifest = made
    attempts: list[Callable[[Store], object]] = [
        lambda store: collect(store, plan_gc(store)),
        lambda store: repair(store, plan_repair(store), remove_lost=True),
        lambda store: store.remove([manifest.id]),
    ]
    with open_store(location) as store:
        store.pin(new_pin(manifest.id, "keep", "me"))
        chosen = [("checkpoints", ERROR), ("packs", PAGE), ("pins", ERROR)]
        for attempt, (folder, page) in product(attempts, chosen):

            def page_for(
                method: str,
                path: str,
                passed: Callable[[], bytes],
                folder: str = folder,
                page: bytes = page,
            ) -> Answer | None:
                return Answer(200, page) if is_list(method, path, folder) else None

            odd.twist = page_for
            with pytest.raises(VmckptError) as refused:
                attempt(store)
            assert f"cannot use {folder}" in refused.value.what or "pinned" in refused.value.what
        odd.twist = Losses.twist
        assert store.ids() == [manifest.id]
        require_same(store, manifest, RAM)
        assert check(store).whole


def test_a_list_that_is_cut_at_a_pages_end_is_not_taken_for_a_whole_one(
    odd: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_PAGE", 2)
    location = new_location()
    create_store(location).close()
    backend = S3Backend(location)
    for name in "abc":
        backend.put(f"packs/{name}", b"")

    def cut(method: str, path: str, passed: Callable[[], bytes]) -> Answer | None:
        if not is_list(method, path, "packs"):
            return None
        first, _, _ = passed().rpartition(b"<Contents>")
        return Answer(200, first + b"</ListBucketResult>")

    odd.twist = cut
    with pytest.raises(StorageError, match="not a list"):
        backend.names("packs")
    odd.twist = Losses.twist
    assert backend.names("packs") == {"a": 0, "b": 0, "c": 0}
    backend.remove("packs/c")
    assert backend.names("packs") == {"a": 0, "b": 0}


@pytest.mark.parametrize("cut", [True, False])
def test_bodies_that_end_too_early_are_read_again(
    odd: Losses, made: tuple[str, Manifest], cut: bool
) -> None:
    """With the length that was promised, and with one that fits."""
    location, manifest = made
    left = 0

    def short(method: str, path: str, passed: Callable[[], bytes]) -> Answer | None:
        nonlocal left
        if method != "GET" or "list-type=2" in path or not left:
            return None
        data = passed()
        left -= 1
        return Answer(200, data, 7) if cut else None if len(data) < 8 else Answer(206, data[:-7])

    with open_store(location) as store:
        odd.twist = short
        for count in (1, 1, 2):
            left = count
            try:
                require_same(store, manifest, RAM)
            except StorageError as exc:
                assert "damaged" not in exc.what
        left = 0
        assert not store.opened.backend.names("damaged")
        assert check(store).whole


@pytest.mark.parametrize(
    ("what", "folder", "size"),
    [("PUT", "checkpoints", 0), ("PUT", "checkpoints", 12 << 20), ("POST", "packs", 0)],
)
def test_an_error_with_a_good_status_is_no_commit(
    odd: Losses, what: str, folder: str, size: int
) -> None:
    """Of a small checkpoint's file, a large one, and a pack, which is put in parts."""
    location = new_location()
    create_store(location).close()

    def refused(method: str, path: str, passed: Callable[[], bytes]) -> Answer | None:
        is_it = method == what and f"/{folder}/" in path and (what == "PUT" or "uploadId=" in path)
        return Answer(200, ERROR) if is_it else None

    with open_store(location) as store:
        odd.twist = refused
        with store.begin("vm") as new, pytest.raises(VmckptError):
            new.blob("device-state", bytes(range(256)) * 4)
            new._file._boxes[0] += bytes(size)
            if folder == "packs":
                area = new.area("ram", size_bytes=12 << 20, chunk_bytes=4096)
                area.put(np.arange(3072), np.random.default_rng(1).bytes(12 << 20))
            new.commit({})
        odd.twist = Losses.twist
        assert not store.ids()
        assert check(store).whole


@pytest.mark.usefixtures("odd")
def test_a_checkpoint_that_another_writer_put_there_is_not_replaced() -> None:
    """Writers of two VMs do not wait for one another."""
    name = new_id()
    with create_store(new_location()) as store:
        with store.begin("a", origin=Origin(name, "a", None, None)) as late:
            late.blob("device-state", b"late")
            with store.begin("b", origin=Origin(name, "b", None, None)) as new:
                new.blob("device-state", b"first")
                first = new.commit({})
            with pytest.raises(ThereAlreadyError, match=name):
                late.commit({})
        assert [one.vm for one in store.manifests()] == ["b"]
        with store.read(first.id) as point:
            assert point.blob("device-state") == b"first"


@pytest.mark.parametrize("size", [1 << 10, 12 << 20])
def test_a_checkpoint_whose_answer_was_lost_is_committed(odd: Losses, size: int) -> None:
    """The storage is asked again, and says that there is one of that name."""
    location = new_location()
    lost = list[str]()

    def lose(method: str, path: str, passed: Callable[[], bytes]) -> Answer | None:
        if method != "PUT" or "/checkpoints/" not in path or lost:
            return None
        passed()
        lost.append(path)
        return Answer(500, ERROR)

    with create_store(location) as store:
        odd.twist = lose
        with store.begin("vm") as new:
            new.blob("device-state", np.random.default_rng(1).bytes(size))
            manifest = new.commit({})
        odd.twist = Losses.twist
        assert lost
        assert store.ids() == [manifest.id]
        assert check(store).whole


def test_requests_that_are_too_many_are_asked_again(
    odd: Losses, made: tuple[str, Manifest]
) -> None:
    location, manifest = made
    asked = 0

    def slow_down(method: str, path: str, passed: Callable[[], bytes]) -> Answer | None:
        nonlocal asked
        asked += 1
        return Answer(503, ERROR.replace(b"InternalError", b"SlowDown")) if asked % 3 == 0 else None

    odd.twist = slow_down
    with open_store(location) as store:
        require_same(store, manifest, RAM)
        store.remove([manifest.id])
        assert not store.ids()
    assert asked > 6


def test_a_removal_that_failed_with_a_good_status_is_said(
    odd: Losses, made: tuple[str, Manifest]
) -> None:
    location, manifest = made
    failed = (
        b'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Error><Key>x</Key>'
        b"<Code>InternalError</Code><Message>again</Message></Error></DeleteResult>"
    )

    def refused(method: str, path: str, passed: Callable[[], bytes]) -> Answer | None:
        return Answer(200, failed) if method == "POST" and "delete" in path else None

    with open_store(location) as store:
        odd.twist = refused
        with pytest.raises(StorageError):
            store.remove([manifest.id])
        odd.twist = Losses.twist
        assert store.ids() == [manifest.id]
