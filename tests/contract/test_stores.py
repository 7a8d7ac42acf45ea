"""One suite for every place that a store may be in."""

import errno
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.guest_like import DISK, RAM, dirtied, memory, read_whole, require_same, save
from tests.object_storage import environment, new_location, s3_server
from vmckpt.errors import (
    BusyError,
    NotFoundError,
    OperationFailedError,
    RefusedError,
    StorageError,
    UsageError,
)
from vmckpt.store.backends.local import LocalBackend
from vmckpt.store.backends.s3 import S3Backend, S3Held
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.open import create_store, open_store
from vmckpt.store.sealing.keys import from_environment, make_key_file
from vmckpt.store.store import Store

PAGES = 512
Places = Callable[[str], str]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture(params=["directory", "encrypted directory", "object storage"])
def locations(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Places:
    """New places for stores, by name."""
    if request.param == "object storage":
        for name, value in environment(request.getfixturevalue("server")).items():
            monkeypatch.setenv(name, value)
        prefix = new_location()
        return lambda name: f"{prefix}/{name}"
    if request.param == "encrypted directory":
        make_key_file(tmp_path / "key")
        monkeypatch.setenv("VMCKPT_STORE_KEY_FILE", str(tmp_path / "key"))
    return lambda name: str(tmp_path / name)


@pytest.fixture
def store(locations: Places) -> Iterator[Store]:
    with create_store(locations("one"), from_environment()) as made:
        yield made


def test_what_was_put_comes_back_whichever_way_it_is_read(store: Store) -> None:
    ram = memory(PAGES, 1)
    manifest = save(store, ram)
    require_same(store, manifest, ram)
    with store.read(manifest.id) as point:
        area = point.area(RAM)
        assert area.numbers().tolist() == np.flatnonzero(ram.any(axis=1)).tolist()
        for page in range(PAGES):
            numbers, contents = area.read_around(page)
            assert page in numbers
            assert bytes(contents) == ram[numbers].tobytes()
    assert check(store).whole


def test_another_process_finds_it(store: Store) -> None:
    manifest = save(store, memory(PAGES, 1), name="first")
    with open_store(store.location) as again:
        assert again.manifests() == [manifest]
        assert again.find("first") == again.find(manifest.id[:6]) == manifest
        assert again.manifests(vm="other") == []
        require_same(again, manifest, memory(PAGES, 1))


def test_a_chain_of_checkpoints_is_read_without_the_chain(store: Store) -> None:
    states = [memory(PAGES, 1)]
    made = [save(store, states[0])]
    for i in range(8):
        ram, dirty = dirtied(states[-1], 40, i)
        states.append(ram)
        made.append(save(store, ram, parent=made[-1], dirty=dirty))
    assert [m.parent for m in made] == [None, *[m.id for m in made[:-1]]]
    assert [m.id for m in store.manifests()] == [m.id for m in made]
    # Not one is left that another came from.
    store.remove([m.id for m in made[::2]])
    collect(store, plan_gc(store))
    for manifest, ram in list(zip(made, states, strict=True))[1::2]:
        require_same(store, manifest, ram)
    assert check(store).whole


def test_what_is_there_twice_is_stored_once(store: Store) -> None:
    ram = memory(PAGES, 1)
    first = save(store, ram)
    distinct = len({page.tobytes() for page in ram}) - 1
    area = first.area(RAM)
    assert area is not None
    assert area.new_chunks == distinct
    assert area.chunks == np.count_nonzero(ram.any(axis=1))
    again = save(store, ram, vm="other")
    assert [a.new_chunks for a in again.areas] == [0, 0]
    # The blob is no chunk.
    assert again.added_bytes < first.added_bytes // 20


def test_zeroes_cost_nothing_and_replace_what_was(store: Store) -> None:
    ram = memory(PAGES, 1)
    first = save(store, ram)
    with store.begin("vm", first.id) as new:
        area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
        area.put_zero(np.arange(10))
        area.put(np.arange(10, 20), bytes(10 * PAGE_CHUNK_BYTES))
        second = new.commit({})
    ram[:20] = 0
    with store.read(second.id) as point:
        assert read_whole(point.area(RAM)) == ram.tobytes()
    assert second.added_bytes < 200


def test_the_last_put_wins(store: Store) -> None:
    one, two = memory(8, 1), memory(8, 2)
    with store.begin("vm") as new:
        area = new.area(RAM, size_bytes=one.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
        area.put(np.arange(8), one.tobytes())
        area.put(np.arange(8)[::-1], two[::-1].tobytes())
        manifest = new.commit({})
    with store.read(manifest.id) as point:
        assert read_whole(point.area(RAM)) == two.tobytes()


def test_a_file_is_taken_span_by_span_and_its_end_is_padded(store: Store, tmp_path: Path) -> None:
    ram = memory(600, 3)
    size = ram.nbytes - 1000
    (tmp_path / "ram").write_bytes(ram.tobytes()[:size])
    fd = os.open(tmp_path / "ram", os.O_RDONLY)
    try:
        with store.begin("vm") as new:
            area = new.area(RAM, size_bytes=size, chunk_bytes=PAGE_CHUNK_BYTES)
            area.put_file(fd, [(0, 8 << 12), (100 << 12, size)])
            with pytest.raises(ValueError, match="whole chunks"):
                area.put_file(fd, [(1, 4096)])
            manifest = new.commit({})
    finally:
        os.close(fd)
    ram[8:100] = 0
    with store.read(manifest.id) as point:
        assert read_whole(point.area(RAM))[:size] == ram.tobytes()[:size]


def test_areas_may_grow_and_shrink(store: Store) -> None:
    ram = memory(64, 1)
    made = save(store, ram)
    for pages in (32, 128):
        size = pages * PAGE_CHUNK_BYTES
        with store.begin("vm", made.id) as new:
            new.area(RAM, size_bytes=size, chunk_bytes=PAGE_CHUNK_BYTES)
            other = new.commit({})
        with store.read(other.id) as point:
            expected = ram.tobytes() + bytes(size)
            assert read_whole(point.area(RAM)) == expected[:size]


def test_a_checkpoint_that_is_not_committed_never_was(store: Store) -> None:
    first = save(store, memory(PAGES, 1))
    before = store.opened.backend.names("packs")

    def fail() -> None:
        with store.begin("vm", first.id) as new:
            area = new.area(RAM, size_bytes=PAGES << 12, chunk_bytes=PAGE_CHUNK_BYTES)
            area.put(np.arange(PAGES), memory(PAGES, 2).tobytes())
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fail()
    with store.begin("vm") as new:
        new.area(RAM, size_bytes=PAGES << 12, chunk_bytes=PAGE_CHUNK_BYTES)
        with pytest.raises(TypeError):
            new.commit({"no": {"json"}})
    assert store.manifests() == [first]
    assert store.opened.backend.names("packs") == before
    assert not store.opened.backend.leftovers()


def test_differences(store: Store) -> None:
    ram = memory(PAGES, 1)
    first = save(store, ram)
    after, _ = dirtied(ram, 50, 1)
    second = save(store, after, vm="other")
    found = store.diff(first.id, second.id)
    assert found[RAM].tolist() == np.flatnonzero((ram != after).any(axis=1)).tolist()
    blocks = (ram != after).reshape(-1, 65536).any(axis=1)
    assert found[DISK].tolist() == np.flatnonzero(blocks).tolist()
    assert not any(map(len, store.diff(first.id, first.id).values()))


def test_one_writes_for_a_vm_at_a_time_and_others_beside(store: Store) -> None:
    with ExitStack() as stack, open_store(store.location) as other:
        stack.enter_context(store.begin("vm"))
        with pytest.raises(BusyError, match="in use"):
            other.begin("vm")
        save(other, memory(16, 1), vm="another")
    save(store, memory(16, 2))


def test_what_is_being_read_is_not_removed(store: Store) -> None:
    manifest = save(store, memory(16, 1))
    other = save(store, memory(16, 2))
    with open_store(store.location) as another:
        with another.read(manifest.id), pytest.raises(BusyError):
            store.remove([other.id, manifest.id])
        assert len(store.manifests()) == 2
    store.remove([other.id, manifest.id])
    assert store.manifests() == []
    with pytest.raises(NotFoundError):
        store.remove([other.id])


def test_gc_gives_back_what_nobody_needs(store: Store) -> None:
    ram = memory(PAGES, 1)
    first = save(store, ram)
    after, dirty = dirtied(ram, 300, 1)
    second = save(store, after, parent=first, dirty=dirty)
    assert plan_gc(store).freed_bytes == 0
    store.remove([first.id])
    plan = plan_gc(store)
    assert plan.rewrites
    freed = collect(store, plan).freed_bytes
    assert freed == pytest.approx(plan.freed_bytes, rel=0.3)
    assert plan_gc(store).freed_bytes == 0
    require_same(store, second, after)
    # What was rewritten serves new ones too.
    third = save(store, ram, vm="other")
    require_same(store, third, ram)
    assert check(store).whole
    store.remove([second.id, third.id])
    collect(store, plan_gc(store))
    assert not store.opened.backend.names("packs")
    assert not store.opened.backend.names("maps")


def test_a_reader_reads_on_while_gc_rewrites_what_it_reads(store: Store) -> None:
    ram = memory(PAGES, 1)
    first = save(store, ram)
    after, dirty = dirtied(ram, 300, 1)
    second = save(store, after, parent=first, dirty=dirty)
    with open_store(store.location) as reader, reader.read(second.id) as point:
        area = point.area(RAM)
        area.read(np.arange(10))
        stream = area.stream()
        next(stream)
        store.remove([first.id])
        assert collect(store, plan_gc(store)).freed_bytes > 0
        assert read_whole(area) == after.tobytes()
        assert sum(len(chunks.numbers) for chunks in stream) > 0
        assert read_whole(point.area(DISK)) == after.tobytes()


def test_what_differs_is_known_while_gc_rewrites_what_it_is_told_by(
    store: Store, locations: Places
) -> None:
    states = [memory(PAGES, 1)]
    saved = [save(store, states[0])]
    for seed in range(2):
        ram, dirty = dirtied(states[-1], 300, seed)
        states.append(ram)
        saved.append(save(store, ram, parent=saved[-1], dirty=dirty))
    ids = saved[1].id, saved[2].id
    with (
        open_store(store.location) as reader,
        create_store(locations("two"), from_environment()) as two,
    ):
        before = reader.diff(*ids)
        store.remove([saved[0].id])
        assert collect(store, plan_gc(store)).freed_bytes > 0
        after = reader.diff(*ids)
        assert {name: list(found) for name, found in after.items()} == {
            name: list(found) for name, found in before.items()
        }
        copy_checkpoints(reader, two, reader.manifests())
        require_same(two, saved[2], states[2])


def test_a_plan_that_came_too_late_takes_nothing_that_is_needed(store: Store) -> None:
    ram = memory(PAGES, 1)
    first = save(store, ram)
    after, dirty = dirtied(ram, 300, 1)
    second = save(store, after, parent=first, dirty=dirty)
    store.remove([first.id])
    plan = plan_gc(store)
    third = save(store, ram, vm="other")
    collect(store, plan)
    require_same(store, second, after)
    require_same(store, third, ram)
    assert check(store).whole


def test_gc_waits_for_writers(store: Store) -> None:
    with ExitStack() as stack, open_store(store.location) as other:
        new = stack.enter_context(store.begin("vm"))
        area = new.area(RAM, size_bytes=16 << 12, chunk_bytes=PAGE_CHUNK_BYTES)
        area.put(np.arange(16), memory(16, 1).tobytes())
        collecting = threading.Thread(target=lambda: collect(other, plan_gc(other)))
        collecting.start()
        collecting.join(0.1)
        assert collecting.is_alive()
        manifest = new.commit({})
        collecting.join(30)
        assert not collecting.is_alive()
    with store.read(manifest.id) as point:
        assert read_whole(point.area(RAM)) == memory(16, 1).tobytes()


def test_copies_are_the_same_and_read_no_more_than_they_must(
    store: Store, locations: Places
) -> None:
    ram = memory(PAGES, 1)
    first = save(store, ram)
    after, dirty = dirtied(ram, 40, 1)
    second = save(store, after, parent=first, dirty=dirty)
    with create_store(locations("two"), from_environment()) as target:
        heard: list[str] = []
        copied = copy_checkpoints(
            store, target, store.manifests(), lambda manifest: heard.append(manifest.id)
        )
        assert [m.id for m in copied] == heard == [first.id, second.id]
        assert [m.parent for m in copied] == [None, first.id]
        assert copied[1].created_unix_s == second.created_unix_s
        area = copied[1].area(RAM)
        assert area is not None
        assert area.given_chunks <= len(dirty)
        require_same(target, first, ram)
        require_same(target, second, after)
        assert copy_checkpoints(store, target, store.manifests()) == []
        assert check(target).whole


def test_a_copy_that_another_was_faster_with_is_left_to_it(store: Store, locations: Places) -> None:
    ram = memory(PAGES, 1)
    one = save(store, ram)
    two = save(store, ram, name="two")
    with (
        create_store(locations("copies"), from_environment()) as copies,
        open_store(copies.location) as other,
    ):

        def copied(manifest: Manifest) -> None:
            assert manifest.id == one.id
            copy_checkpoints(store, other, [two])

        assert [m.id for m in copy_checkpoints(store, copies, [one, two], copied)] == [one.id]
        require_same(copies, copies.manifest(two.id), ram)


def test_gc_takes_a_checkpoint_that_was_removed_and_copied_again_for_a_new_one(
    store: Store, locations: Places
) -> None:
    ram = memory(PAGES, 1)
    first = save(store, ram)
    with create_store(locations("other"), from_environment()) as other:
        copy_checkpoints(store, other, [first])
        assert check(other).whole
        with open_store(other.location) as collecting:
            plan = plan_gc(collecting)
            # As docs/store.md says of one that is damaged.
            other.remove([first.id])
            copy_checkpoints(store, other, [first])
            collect(collecting, plan)
        assert check(other).whole
        require_same(other, first, ram)


def test_a_name_that_several_vms_have_is_no_one_checkpoint(store: Store) -> None:
    """`store export FILE before-upgrade` would carry another VM away."""
    made = [save(store, memory(16, seed), vm=vm, name="n") for seed, vm in ((1, "web"), (2, "db"))]
    with pytest.raises(UsageError, match="matches several checkpoints") as refused:
        store.find("n")
    assert all(one.id[:12] in refused.value.why for one in made)
    assert store.find("n", vm="web").id == made[0].id
    again = save(store, memory(16, 3), vm="web", parent=made[0], name="n")
    assert store.find("n", vm="web").id == again.id
    assert store.find(made[1].id[:8]).id == made[1].id
    # Who may add to a store gives his own the name that an operator types.
    save(store, memory(16, 4), vm="theirs", name=made[0].id[:12])
    with pytest.raises(UsageError, match="matches several checkpoints"):
        store.find(made[0].id[:12])
    assert store.find(made[0].id[:13]).id == store.find(made[0].id).id == made[0].id


def test_what_is_wrong_with_a_request_is_said(store: Store) -> None:
    with pytest.raises(RefusedError, match="store already"):
        create_store(store.location)
    with pytest.raises(NotFoundError):
        store.manifest("0" * 32)
    with pytest.raises(NotFoundError):
        store.begin("vm", "0" * 32)
    with pytest.raises(NotFoundError):
        store.find("nothing")
    first = save(store, memory(16, 1))
    with store.read(first.id) as point, pytest.raises(NotFoundError, match="no part 'x'"):
        point.area("x")
    with store.begin("vm") as new:
        area = new.area(RAM, size_bytes=8192, chunk_bytes=PAGE_CHUNK_BYTES)
        with pytest.raises(UsageError):
            new.blob(RAM, b"")
        with pytest.raises(ValueError, match="chunks"):
            area.put(np.array([2]), bytes(4096))
        with pytest.raises(ValueError, match="chunks"):
            area.put(np.array([0]), bytes(4095))


def test_a_large_checkpoint_may_have_its_files_open(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    try:
        with create_store(str(tmp_path / "one")):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            assert soft == min(hard, 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_there_is_no_store_before_one_is_made(locations: Places) -> None:
    with pytest.raises(NotFoundError, match="store init"):
        open_store(locations("nowhere"))


def test_the_lock_of_a_dead_writer_in_object_storage_is_had_after_a_while(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    location = new_location()
    # It writes its lock no more, as the dead do.
    dead = S3Backend(location, expiry_s=2, refresh_s=1000)
    others = S3Backend(location, expiry_s=2, refresh_s=0.2)
    with dead.hold("x", shared=True) as lost:
        lost.require()
        with others.hold("x", shared=True):
            pass
        with pytest.raises(BusyError, match="less than 2 s ago"), others.hold("x", shared=False):
            pass
        with others.hold("x", shared=False, wait_s=60) as held:
            with pytest.raises(OperationFailedError, match="was lost"):
                lost.require()
            # Who lives keeps it.
            with pytest.raises(BusyError), dead.hold("x", shared=True, wait_s=4):
                pass
            held.require()


@pytest.mark.parametrize("fails", [True, False])
def test_a_lock_that_may_have_been_anothers_is_lost_for_good(*, fails: bool) -> None:
    began_s, calls = time.monotonic(), 0

    def refresh() -> None:
        nonlocal calls
        calls += 1
        if time.monotonic() - began_s < 1.0:  # the storage is away, or takes its time
            if fails:
                raise StorageError("away", why="-", remedy="-")
            time.sleep(1.0)

    held = S3Held(refresh, 0.05, 1.0)
    time.sleep(1.5)
    had = calls
    for _ in range(3):
        with pytest.raises(OperationFailedError, match="was lost"):
            held.require()
        time.sleep(0.1)
    assert calls == had
    held.stop()


def test_a_reader_goes_on_when_another_host_removes_an_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS what was removed by another host cannot be read (ESTALE), though it is open here."""
    right = os.pread

    def pread(fd: int, length: int, offset: int) -> bytes:
        if not os.fstat(fd).st_nlink:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return right(fd, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    ram = memory(PAGES, 1)
    kept = ram.copy()
    kept[: PAGES * 2 // 3] = 0
    with create_store(str(tmp_path / "store")) as store:
        first, second = save(store, ram), save(store, kept)
        with store.read(second.id) as point:
            area = point.area(RAM)
            assert bytes(area.read(np.arange(PAGES - 9, PAGES))) == kept[-9:].tobytes()
            with open_store(store.location) as other:
                other.remove([first.id])
                plan = plan_gc(other)
                assert plan.rewrites
                collect(other, plan)
            assert read_whole(area) == kept.tobytes()


def test_what_nfs_keeps_of_a_removed_file_is_none_of_the_stores(tmp_path: Path) -> None:
    with create_store(str(tmp_path / "store")) as store:
        save(store, memory(PAGES, 1))
        for folder in ("checkpoints", "packs", "tmp"):
            (tmp_path / "store" / folder / ".nfs000000000000001").write_bytes(b"open still")
        collect(store, plan_gc(store))
        assert check(store).whole


def test_a_checkpoint_that_could_not_be_read_back_is_not_made(store: Store) -> None:
    deep: dict[str, object] = {}
    for _ in range(80):
        deep = {"more": deep}
    with pytest.raises(StorageError), store.begin("vm") as new:
        new.commit(deep)
    with pytest.raises(StorageError), store.begin("vm") as new:
        new.area("ram\n", size_bytes=PAGE_CHUNK_BYTES, chunk_bytes=PAGE_CHUNK_BYTES)
        new.commit({})
    assert not store.ids()
    assert check(store).whole


@pytest.mark.parametrize("folder", ["checkpoints", "packs"])
def test_a_folder_whose_disk_is_not_mounted_is_not_an_empty_one(
    tmp_path: Path, folder: str
) -> None:
    location, disk = tmp_path / "store", tmp_path / "disk"
    with create_store(str(location)) as store:
        first = save(store, memory(PAGES, 1))
    disk.mkdir()
    (location / folder).rename(disk / folder)
    (location / folder).symlink_to(disk / folder)
    disk.rename(tmp_path / "elsewhere")
    with open_store(str(location)) as store:
        for command in (plan_gc, check, Store.ids if folder == "checkpoints" else check):
            with pytest.raises(StorageError, match=folder) as error:
                command(store)
            assert "not there" in error.value.why
    (tmp_path / "elsewhere").rename(disk)
    with open_store(str(location)) as store:
        collect(store, plan_gc(store))
        require_same(store, first, memory(PAGES, 1))


def test_a_folder_on_another_file_system_is_read_and_says_why_nothing_is_written(
    tmp_path: Path,
) -> None:
    location, ram = tmp_path / "store", memory(PAGES, 1)
    with create_store(str(location)) as store:
        first = save(store, ram)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if Path(other).stat().st_dev == location.stat().st_dev:
            pytest.skip("the temporary files of this test are in /dev/shm")
        shutil.move(location / "packs", other)
        (location / "packs").symlink_to(Path(other, "packs"))
        with open_store(str(location)) as store:
            assert check(store).whole
            require_same(store, first, ram)
            with pytest.raises(StorageError, match="packs") as error:
                save(store, memory(PAGES, 2))
            assert "another file system" in error.value.why
            assert "move all of the store" in error.value.remedy
            assert store.ids() == [first.id]


def test_a_file_that_goes_while_its_folder_is_listed_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(tmp_path)
    for name in ("one", "gone", "other"):
        (tmp_path / name).write_text("x")
    listed = os.scandir

    @contextmanager
    def goes(path: Path) -> Iterator[Iterator["os.DirEntry[str]"]]:
        def entries() -> Iterator["os.DirEntry[str]"]:
            for entry in found:
                if entry.name == "gone":
                    Path(entry.path).unlink()
                yield entry

        with listed(path) as found:
            yield entries()

    monkeypatch.setattr(os, "scandir", goes)
    assert backend.names("") == {"one": 1, "other": 1}
    monkeypatch.undo()
    assert backend.names("nowhere") == {}


def test_object_storage_without_tls_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment("http://192.0.2.1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(RefusedError, match="without TLS"):
        open_store(new_location())
