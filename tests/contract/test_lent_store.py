"""A store in a directory of another machine, used through a process there, as any other."""

import asyncio
import os
import signal
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest_like import dirtied, memory, require_same, save
from vmckpt.checkpoint.catalogue.location import lent
from vmckpt.errors import BusyError, HostDownError, NotFoundError, RefusedError, StorageError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import find_by_argument
from vmckpt.store.backends import lent as module
from vmckpt.store.backends.lent import LentBackend
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.open import create_store, open_store
from vmckpt.store.sealing.keys import KeyHolder, KeySource, make_key_file
from vmckpt.store.store import Store

PAGES = 512


def backend(short_path: Path, name: str = "store") -> LentBackend:
    host = LocalHost("there", short_path / "state", "127.0.0.1")
    path = str(short_path / name)
    return LentBackend(asyncio.run(lent(host, path)), f"there:{path}")


@pytest.fixture
def store(short_path: Path) -> Iterator[Store]:
    with create_store(backend(short_path)) as made:
        yield made


def test_it_is_a_store_like_any(store: Store, short_path: Path) -> None:
    states = [memory(PAGES, 1)]
    made = [save(store, states[0])]
    for number in range(4):
        ram, dirty = dirtied(states[-1], 40, number)
        states.append(ram)
        made.append(save(store, ram, parent=made[-1], dirty=dirty))
    store.remove([one.id for one in made[::2]])
    collect(store, plan_gc(store))
    assert check(store).whole
    with open_store(str(short_path / "store")) as direct:
        for manifest, ram in list(zip(made, states, strict=True))[1::2]:
            require_same(store, manifest, ram)
            require_same(direct, manifest, ram)
    with pytest.raises(NotFoundError):
        store.manifest(made[0].id)


def test_one_writes_at_a_time_whichever_way_they_come(store: Store, short_path: Path) -> None:
    with open_store(str(short_path / "store")) as direct:
        with store.begin("vm"), pytest.raises(BusyError):
            direct.begin("vm")
        with direct.begin("vm"), pytest.raises(BusyError):
            store.begin("vm")
        with store.begin("vm"):
            pass


def test_who_goes_leaves_no_lock_and_nothing_half_made(short_path: Path) -> None:
    create_store(str(short_path / "store")).close()
    gone = open_store(backend(short_path))
    # Its lock goes with the object: this one is to go with the stream.
    kept = gone.begin("vm")
    gone.opened.backend.write("packs/half").write(b"half")
    ram = memory(PAGES, 1)
    gone.close()
    with open_store(str(short_path / "store")) as direct:
        deadline_s = time.monotonic() + 60
        while not _free(direct):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert not direct.opened.backend.leftovers()
        require_same(direct, save(direct, ram), ram)
    del kept


def test_a_far_side_that_dies_is_an_error_and_no_checkpoint(store: Store, short_path: Path) -> None:
    ram = memory(PAGES, 1)
    whole = save(store, ram)
    new = store.begin("vm", whole.id)
    for process in find_by_argument(f"lend\0{short_path}"):
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(StorageError, match="does not answer"):
        new.commit({})
    with open_store(str(short_path / "store")) as direct:
        assert [one.id for one in direct.manifests()] == [whole.id]
        assert check(direct).whole


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Whoever runs tests in the background has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_a_question_that_is_interrupted_is_the_last() -> None:
    ours, silent = socket.socketpair()
    backend_ = LentBackend(ours, "there:/store")
    main = threading.main_thread().ident
    assert main
    with silent:
        # No one answers: it is interrupted wherever it waits.
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            backend_.names("packs")
        with pytest.raises(StorageError, match="does not answer"):
            backend_.names("packs")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        struct.pack("<II", 400_000, 0) + b"[" * 200_000 + b"]" * 200_000,
        struct.pack("<II", 1 << 31, 0),
        struct.pack("<II", 4, 0) + b"nope",
    ],
    ids=["nothing", "deep", "long", "none"],
)
def test_a_far_side_that_does_not_answer_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """Its disk hangs: each command that looks into all stores waited for it without end."""
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    ours, theirs = socket.socketpair()
    backend = LentBackend(ours, "far:")
    saying = threading.Thread(target=theirs.sendall, args=(said,))
    saying.start()
    began_s = time.monotonic()
    for _ in range(2):  # and is not asked again
        with pytest.raises(StorageError, match="does not answer"):
            backend.names("packs")
    assert time.monotonic() - began_s < 10
    theirs.close()
    saying.join()


@pytest.mark.parametrize(
    ("words_bytes", "data_bytes", "length"),
    [(2, (1 << 32) - 1, None), (2, 1 << 28, 16), ((1 << 28) - 1, 0, 16)],
    ids=["a whole object", "more than was asked for", "an answer that is too long"],
)
def test_memory_is_not_taken_for_what_a_far_side_announces(
    words_bytes: int, data_bytes: int, length: int | None
) -> None:
    ours, theirs = socket.socketpair()

    def far() -> None:
        theirs.recv(1 << 16)
        theirs.sendall(struct.pack("<II", words_bytes, data_bytes) + b"{}")
        theirs.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=far)
    thread.start()
    hostile = LentBackend(ours, "there:/store")
    tracemalloc.start()
    try:
        with pytest.raises(StorageError, match="does not answer"):
            hostile.read("packs/x", 0, length)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
        thread.join()
        theirs.close()
        hostile.close()


def test_copies_from_one_host_to_another(store: Store, short_path: Path) -> None:
    ram = memory(PAGES, 1)
    first = save(store, ram)
    later, dirty = dirtied(ram, 40, 1)
    second = save(store, later, parent=first, dirty=dirty)
    with create_store(backend(short_path, "other")) as target:
        assert [one.id for one in copy_checkpoints(store, target, store.manifests())] == [
            first.id,
            second.id,
        ]
        require_same(target, second, later)


def test_the_far_side_has_no_key(short_path: Path) -> None:
    make_key_file(short_path / "key")
    key = KeySource(KeyHolder.FILE, str(short_path / "key"))
    ram = memory(PAGES, 1)
    with create_store(backend(short_path), key) as made:
        manifest = save(made, ram)
    with pytest.raises(RefusedError, match="encrypted"):
        open_store(backend(short_path))
    with open_store(backend(short_path), key) as again:
        require_same(again, manifest, ram)


def test_a_directory_that_nobody_may_use_is_said(short_path: Path) -> None:
    host = LocalHost("there", short_path / ("x" * 120), "127.0.0.1")
    with pytest.raises(HostDownError, match="does not give access"):
        asyncio.run(lent(host, str(short_path / "store")))


def _free(direct: Store) -> bool:
    try:
        direct.begin("vm").abort()
    except BusyError:
        return False
    return True
