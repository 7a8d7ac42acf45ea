"""Small packs are merged, and stay what they were: for readers, writers, checks and other gcs."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.contract.test_store_lost_locks import void
from tests.guest_like import RAM
from tests.lent_store import lent
from tests.object_storage import environment, new_location, s3_server
from tests.small_packs import (
    PAGES,
    Asked,
    Killed,
    Made,
    Stepped,
    add,
    collect_now,
    make_small,
    objects,
    require_all,
    require_one,
    require_whole,
)
from vmckpt.errors import RefusedError, StorageError, UsageError
from vmckpt.store import collect as gc
from vmckpt.store.backends.lent import LentBackend
from vmckpt.store.backends.local import LocalBackend, LocalWriter
from vmckpt.store.backends.s3 import S3Backend
from vmckpt.store.bundles import bundled, merging
from vmckpt.store.bundles.layout import Bundle
from vmckpt.store.bundles.merging import MANY as MANY_PACKS
from vmckpt.store.bundles.merging import Merge, merge
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.compression import compress
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.damage.repair import plan_repair, repair
from vmckpt.store.errors import DamagedError
from vmckpt.store.files import header
from vmckpt.store.files.config import KEYS, MERGED, ONE_KEY, Config, copies, read_config
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES
from vmckpt.store.keyring import add_key, restore_backup, rotate_key
from vmckpt.store.open import create_store, new_archive, open_store
from vmckpt.store.sealing.keys import KeyHolder, KeySource, make_key_file
from vmckpt.store.sealing.seal import Box
from vmckpt.store.store import Store

MOST = 200
MANY = [20, pytest.param(MOST, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url


class Kind:
    """A kind of place for stores. What a new client's command asks is counted."""

    def __init__(self, new: Callable[[], Asked], path: Path, key: KeySource | None = None) -> None:
        self._new, self._path, self.key = new, path, key
        self.asked = new()

    def make(self, many: int) -> list[Made]:
        """The store, with so many checkpoints."""
        with create_store(str(self._path), self.key) as store:
            made = make_small(store, many)
        if isinstance(self.asked.inner, S3Backend):
            for one in self._path.rglob("*"):
                if one.is_file() and one.name != "lock":
                    self.asked.inner.put(str(one.relative_to(self._path)), one.read_bytes())
        return made

    @contextmanager
    def open(self) -> Iterator[Store]:
        """Open the store."""
        self.asked = self._new()
        with open_store(self.asked, self.key) as store:
            yield store

    def objects(self) -> dict[str, int]:
        """How many there are, by folder."""
        return dict(objects(self._new().inner))


@pytest.fixture(params=["directory", "encrypted directory", "lent", "object storage"])
def kind(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kind]:
    path = tmp_path / "store"
    if request.param == "object storage":
        for name, value in environment(request.getfixturevalue("server")).items():
            monkeypatch.setenv(name, value)
        location, caches = new_location(), iter(range(1000))

        def new() -> Asked:
            monkeypatch.setenv("VMCKPT_CACHE_DIR", str(tmp_path / f"cache-{next(caches)}"))
            return Asked(S3Backend(location))

        yield Kind(new, path)
    elif request.param == "lent":
        with lent(path) as backend:
            yield Kind(lambda: Asked(Unclosed(backend)), path)
    else:
        key = None
        if request.param == "encrypted directory":
            make_key_file(tmp_path / "key")
            key = KeySource(KeyHolder.FILE, str(tmp_path / "key"))
        yield Kind(lambda: Asked(LocalBackend(path)), path, key)


class Unclosed(LentBackend):
    """One connection for many commands."""

    def __init__(self, inner: LentBackend) -> None:
        super().__init__(inner._sock, inner.location)

    def close(self) -> None:
        pass


def costs(kind: Kind, made: list[Made]) -> dict[str, int]:
    """What a command asks that knows nothing of the store yet."""
    found = {}

    def restore(store: Store) -> None:
        require_one(store, *made[-1])

    def write(store: Store) -> None:
        store.begin("other", made[-1].manifest.id).abort()

    commands: dict[str, Callable[[Store], object]] = {"list": Store.catalogue, "restore": restore}
    commands |= {"begin": write, "check": check}
    for name, command in commands.items():
        with kind.open() as store:
            before = sum(kind.asked.counts.values())
            command(store)
            found[name] = sum(kind.asked.counts.values()) - before
    return found


@pytest.mark.parametrize("many", MANY)
def test_many_small_checkpoints_have_few_objects(
    kind: Kind, many: int, capsys: pytest.CaptureFixture[str]
) -> None:
    made = kind.make(many)
    before, asked_before = kind.objects(), costs(kind, made)
    assert before["packs"] >= many
    # The first one makes it a store of format 3.
    with kind.open() as store:
        assert collect_now(store).bundles == 0
    with kind.open() as store:
        assert collect_now(store).bundles == 1
    after, asked_after = kind.objects(), costs(kind, made)
    if many == MOST:
        with capsys.disabled():
            print(f"\n{kind.asked.location}: {before} -> {after}; {asked_before} -> {asked_after}")
    assert after["packs"] == 0
    assert after["bundles"] == 1
    with kind.open() as store:
        require_all(store, made)
        require_whole(store)
        # Nothing is left to be done.
        assert collect_now(store)[:2] == (0, 0)
    assert kind.objects() == after
    if kind.asked.is_remote:
        assert asked_after["restore"] < 10 < asked_before["restore"]
    assert asked_after["begin"] <= asked_before["begin"] - many
    assert asked_after["check"] <= asked_before["check"] - many


class Ready(NamedTuple):
    """A store of format 3 with many small packs."""

    location: Path
    made: list[Made]

    def copied(self, to: Path) -> Path:
        """Another one like it."""
        shutil.copytree(self.location, to)
        return to


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    location = tmp_path_factory.mktemp("ready") / "store"
    with create_store(str(location)) as store:
        made = make_small(store, 18)
        collect_now(store)
    return Ready(location, made)


@pytest.fixture(scope="module")
def merged(ready: Ready, tmp_path_factory: pytest.TempPathFactory) -> Ready:
    """The same, after its packs were merged."""
    location = ready.copied(tmp_path_factory.mktemp("merged") / "store")
    with open_store(str(location)) as store:
        assert collect_now(store).bundles == 1
    return Ready(location, ready.made)


STEP = [29, pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]


def require_merged(location: Path, made: list[Made]) -> None:
    """All of it is there, before and after the next gc, which leaves one bundle."""
    with open_store(str(location)) as store:
        require_all(store, made)
        require_whole(store)
        collect_now(store)
    with open_store(str(location)) as store:
        require_all(store, made)
        require_whole(store)
        found = objects(LocalBackend(location))
        assert found["bundles"] == 1
        assert found["packs"] < 16
        assert not collect_now(store).bundles


@pytest.mark.parametrize("step", STEP)
def test_gc_is_killed_at_any_instant(tmp_path: Path, ready: Ready, step: int) -> None:
    def kill() -> None:
        raise Killed

    for at in count(1, step):
        location = ready.copied(tmp_path / str(at))
        backend = Stepped(location)
        with open_store(backend) as store:
            plan = plan_gc(store)
            backend.count, backend.at, backend.then = 0, at, kill
            with suppress(Killed):
                collect(store, plan)
        require_merged(location, ready.made)
        shutil.rmtree(location)
        if backend.count < at:
            break
    assert at > 60


def test_gc_is_killed_while_it_raises_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "MANY", 2)
    with create_store(str(tmp_path / "made")) as store:
        made = make_small(store, 2)

    def kill() -> None:
        raise Killed

    for at in count(1):
        location = Ready(tmp_path / "made", made).copied(tmp_path / str(at))
        backend = Stepped(location)
        with open_store(backend) as store:
            plan = plan_gc(store)
            backend.count, backend.at, backend.then = 0, at, kill
            with suppress(Killed):
                collect(store, plan)
        with open_store(str(location)) as store:
            require_one(store, *made[-1])
            assert not check(store).lost
            collect_now(store)
        with open_store(str(location)) as store:
            assert store.config.format == MERGED
            assert {one.encode() for one in configs(store)} == {store.config.encode()}
            require_whole(store)
        shutil.rmtree(location)
        if backend.count < at:
            break
    assert at > 10


def configs(store: Store) -> list[Config]:
    """The copies, all of which are whole."""
    found = copies(store.opened.backend).values()
    assert all(isinstance(one, Config) for one in found)
    return [one for one in found if isinstance(one, Config)]


@pytest.mark.parametrize("step", STEP)
def test_two_gcs_at_once_leave_a_copy_of_each_pack(tmp_path: Path, ready: Ready, step: int) -> None:
    """Without locks: one comes at any instant of the other."""
    for at in count(1, step):
        location = ready.copied(tmp_path / str(at))
        backend = Stepped(location)
        with open_store(backend) as store, open_store(Stepped(location)) as other:
            plans = plan_gc(store), plan_gc(other)
            backend.count, backend.at = 0, at
            backend.then = partial(void, partial(collect, other, plans[1]))
            void(partial(collect, store, plans[0]))
        with open_store(str(location)) as store:
            require_all(store, ready.made)
        require_merged(location, ready.made)
        shutil.rmtree(location)
        if backend.count < at:
            break
    assert at > 60


@pytest.mark.parametrize("step", STEP)
def test_a_writer_commits_at_any_instant_of_a_merge(
    tmp_path: Path, ready: Ready, step: int
) -> None:
    committed = set[bool]()
    for at in count(1, step):
        location = ready.copied(tmp_path / str(at))
        backend = Stepped(location)
        with open_store(Stepped(location)) as late, open_store(backend) as store:
            last, made = ready.made[-1], list[Made]()
            new = late.begin("late", last.manifest.id)
            new.area(RAM, size_bytes=last.ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
            new.blob("device-state", last.ram[1, :64].tobytes())

            def commit() -> None:
                made.append(Made(new.commit({}), last.ram))  # noqa: B023

            plan = plan_gc(store)
            backend.count, backend.at, backend.then = 0, at, partial(void, commit)
            collect(store, plan)
            new.abort()
        committed.add(bool(made))
        require_merged(location, [*ready.made, *made])
        shutil.rmtree(location)
        if backend.count < at:
            break
    # A merge takes nothing away that a commit rests on: only the last one came after its end.
    assert committed == {True, False}


@pytest.mark.parametrize("step", STEP)
def test_a_merge_at_any_instant_of_a_commit(tmp_path: Path, ready: Ready, step: int) -> None:
    last = ready.made[-1]
    for at in count(1, max(1, step // 5)):
        location = ready.copied(tmp_path / str(at))
        backend = Stepped(location)
        with open_store(backend) as late, open_store(Stepped(location)) as store:
            backend.count, backend.at = 0, at
            backend.then = partial(void, partial(collect_now, store))
            new = late.begin("late", last.manifest.id)
            new.area(RAM, size_bytes=last.ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
            new.blob("device-state", last.ram[1, :64].tobytes())
            made = Made(new.commit({}), last.ram)
        require_merged(location, [*ready.made, made])
        shutil.rmtree(location)
        if backend.count < at:
            break
    assert at > 10


@pytest.mark.parametrize("gc_first", [True, False])
@pytest.mark.parametrize("step", STEP)
def test_a_commit_and_a_gc_that_makes_a_worn_bundle_anew(
    tmp_path: Path, merged: Ready, step: int, *, gc_first: bool
) -> None:
    """What the writer found is needed by no checkpoint any longer: it commits in time, or not."""
    last, kept, committed = merged.made[-1], merged.made[:9], set[bool]()
    for at in count(1, max(1, step // 3)):
        location = merged.copied(tmp_path / str(at))
        writing, collecting, made = Stepped(location), Stepped(location), list[Made]()
        with open_store(writing) as late, open_store(collecting) as store:
            new = late.begin("late", last.manifest.id)
            new.area(RAM, size_bytes=last.ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
            new.blob("device-state", last.ram[1, :64].tobytes())
            store.remove([one.manifest.id for one in merged.made[9:]])

            def commit() -> None:
                made.append(Made(new.commit({}), last.ram))  # noqa: B023

            works: list[Callable[[], object]] = [partial(collect_now, store), commit]
            first, then = works if gc_first else reversed(works)
            stepped = collecting if gc_first else writing
            stepped.count, stepped.at, stepped.then = 0, at, partial(void, then)
            void(first)
            new.abort()
        committed.add(bool(made))
        for _ in range(2):
            with open_store(str(location)) as store:
                require_all(store, [*kept, *made])
                require_whole(store)
                collect_now(store)
        shutil.rmtree(location)
        if stepped.count < at:
            break
    assert committed == {True, False}


def test_a_reader_whose_list_is_old_finds_what_was_moved(tmp_path: Path, ready: Ready) -> None:
    location = ready.copied(tmp_path / "store")
    with open_store(str(location)) as reader, open_store(str(location)) as other:
        require_one(reader, *ready.made[-1])
        streams = [reader.read(made.manifest.id) for made in ready.made[:4]]
        assert collect_now(other).bundles == 1
        require_all(reader, ready.made)
        # What is in one bundle goes to another one.
        gone = [made.manifest.id for made in ready.made[1:]]
        kept = ready.made[:1]
        other.remove(gone)
        collect_now(other)
        collect_now(other)
        require_all(reader, kept)
        require_whole(reader)
        del streams


def bundle_of(location: Path) -> tuple[Path, Bundle]:
    """The only bundle: its file, and what it has."""
    with open_store(str(location)) as store:
        [bundle] = store.opened.backend.list_holdings().bundles.values()
    return location / bundle.name, bundle


def flip(path: Path, at: int) -> None:
    """A bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_flipped_bit_in_a_bundle_is_found_recorded_and_healed(
    tmp_path: Path, merged: Ready
) -> None:
    location = merged.copied(tmp_path / "store")
    path, bundle = bundle_of(location)
    pack = merged.made[-1].manifest.packs[-1]
    [member] = [one for one in bundle.members.values() if pack in one.name]
    flip(path, member.frames_at + member.frame_bytes // 2)
    with open_store(str(location)) as store:
        report = check(store)
        assert merged.made[-1].manifest.id in report.lost
        assert {one.name for one in report.findings} == {member.name}
        assert store.opened.records.slots(bytes.fromhex(pack), 0).tolist() == [0, 1, 2]
        for made in merged.made:
            if made.manifest.id not in report.lost:
                require_one(store, *made)
    with open_store(str(location)) as store:
        # The same content, put by any checkpoint.
        again = add(store, merged.made[-1].ram, np.arange(PAGES), vm="other")
        require_one(store, *merged.made[-1])
        assert collect_now(store).healed == 3
        require_whole(store)
        store.remove([again.id])
        collect_now(store)
        require_all(store, merged.made)
        require_whole(store)


def places_of_lists(bundle: Bundle) -> dict[str, int]:
    """Bits outside packs."""
    return {
        "header": 20,
        "length": 49,
        "list": 80,
        "second list": bundle.size - 80,
        "second header": bundle.size - 20,
        "second length": bundle.size - 2,
    }


@pytest.mark.parametrize(
    "where", ["header", "length", "list", "second list", "second header", "second length"]
)
def test_a_flipped_bit_in_a_list_loses_nothing(tmp_path: Path, merged: Ready, where: str) -> None:
    location = merged.copied(tmp_path / "store")
    path, bundle = bundle_of(location)
    flip(path, places_of_lists(bundle)[where])
    with open_store(str(location)) as store:
        require_all(store, merged.made)
        report = check(store)
        assert [one.name for one in report.findings] == [bundle.name]
        assert not report.lost
        assert collect_now(store).bundles == 1
        require_whole(store)
        require_all(store, merged.made)
        assert not path.exists()


def test_a_bundle_whose_lists_are_both_damaged_is_refused_and_goes_when_it_may(
    tmp_path: Path, merged: Ready
) -> None:
    location = merged.copied(tmp_path / "store")
    path, bundle = bundle_of(location)
    flip(path, 80)
    flip(path, bundle.size - 80)
    with open_store(str(location)) as store:
        report = check(store)
        assert report.lost.keys() == {made.manifest.id for made in merged.made}
        assert bundle.name in {one.name for one in report.findings}
        with pytest.raises(DamagedError):
            require_one(store, *merged.made[0])
        # What it has may be wanted from it yet.
        collect_now(store)
        assert path.exists()
        new = add(store, merged.made[0].ram, np.arange(PAGES))
        repair(store, plan_repair(store), remove_lost=True)
        assert store.ids() == [new.id]
        assert not path.exists()
        require_whole(store)


def test_what_is_not_needed_any_more_goes(tmp_path: Path, merged: Ready) -> None:
    location = merged.copied(tmp_path / "store")
    path, _ = bundle_of(location)
    size = path.stat().st_size
    with open_store(str(location)) as store:
        # Each has a pack of its own, which all after it need: those of the last ones go.
        store.remove([made.manifest.id for made in merged.made[9:]])
        plan = plan_gc(store)
        assert plan.merges
        collect(store, plan)
        require_all(store, merged.made[:9])
        require_whole(store)
        assert not path.exists()
        [left] = (location / "bundles").glob("[0-9a-f]*")
        assert left.stat().st_size < size * 0.8
        assert collect_now(store)[:2] == (0, 0)
        store.remove([made.manifest.id for made in merged.made[:9]])
        collect_now(store)
        assert not any(objects(store.opened.backend).values())


def test_new_small_packs_are_merged_when_there_are_many_again(
    tmp_path: Path, merged: Ready
) -> None:
    location = merged.copied(tmp_path / "store")
    with open_store(str(location)) as store:
        more = make_small(store, MANY_PACKS - 1, seed=1, vm="other")
        assert collect_now(store).bundles == 0
        more += make_small(store, 1, seed=2, vm="third")
        assert collect_now(store).bundles == 1
        require_all(store, [*merged.made, *more])
        assert objects(LocalBackend(location))["bundles"] == 2


def test_many_small_bundles_become_one(tmp_path: Path, ready: Ready) -> None:
    location = ready.copied(tmp_path / "store")
    with open_store(str(location)) as store:
        held = store.opened.backend.list_holdings()
        for name in held.loose:
            merge(store, held, [Merge([(name, name)])])
        collect_now(store)
    found = objects(LocalBackend(location))
    assert found["packs"] == 0
    with open_store(str(location)) as store:
        require_all(store, ready.made)
        collect_now(store)
        require_all(store, ready.made)
        require_whole(store)
    assert objects(LocalBackend(location))["bundles"] == 1


def test_a_copy_that_is_not_what_it_was_takes_no_other_with_it(
    tmp_path: Path, ready: Ready
) -> None:
    """A gc was killed once it had published a bundle; then a bit of that flips."""
    location = ready.copied(tmp_path / "store")
    with open_store(str(location)) as store:
        merge(store, store.opened.backend.list_holdings(), plan_gc(store).merges)
    path, bundle = bundle_of(location)
    member = next(iter(bundle.members.values()))
    flip(path, member.frames_at + 5)
    for _ in range(2):
        with open_store(str(location)) as store:
            require_all(store, ready.made)
            require_whole(store)
            collect_now(store)
    assert objects(LocalBackend(location))["packs"] == 1
    # The other copy is read where its own object's is damaged, and the other way round.
    flip(location / member.name, member.size - 200)
    with open_store(str(location)) as store:
        require_all(store, ready.made)


def test_much_is_merged_a_part_at_a_time(
    tmp_path: Path, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = ready.copied(tmp_path / "store")
    monkeypatch.setattr(merging, "MOST_BYTES", 40_000)
    monkeypatch.setattr(merging, "MANY", 3)
    monkeypatch.setattr(gc, "_MERGES", 2)
    before = sum(one.stat().st_size for one in (location / "packs").glob("[0-9a-f]*"))
    most = 0

    def measure(backend: LocalBackend, name: str) -> LocalWriter:
        nonlocal most
        files = [one for one in location.rglob("*") if one.is_file()]
        most = max(most, sum(one.stat().st_size for one in files if one.parent.name != "tmp"))
        return write(backend, name)

    write = LocalBackend.write
    with open_store(str(location)) as store:
        monkeypatch.setattr(LocalBackend, "write", measure)
        assert collect_now(store).bundles > 3
        monkeypatch.undo()
        require_all(store, ready.made)
        require_whole(store)
    assert objects(LocalBackend(location))["packs"] < 3
    others = sum(one.stat().st_size for one in (location / "checkpoints").glob("[0-9a-f]*"))
    assert most < before + others + 200_000


def test_a_full_disk_keeps_gc_from_merging_alone(
    tmp_path: Path, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = ready.copied(tmp_path / "store")
    with open_store(str(location)) as store:
        gone = make_small(store, 1, seed=5, vm="gone")
        store.remove([gone[0].manifest.id])
        [dead] = plan_gc(store).dead.keys() & {f"packs/{p}-0" for p in gone[0].manifest.packs}

        def full(*_: object) -> None:
            raise StorageError("cannot write", why="No space left on device", remedy="-")

        monkeypatch.setattr(store.opened.backend.files, "write", full)
        with pytest.raises(StorageError, match="cannot write"):
            collect_now(store)
        assert not (location / dead).exists()
    require_merged(location, ready.made)


def test_a_client_that_may_only_add_merges_nothing(tmp_path: Path, ready: Ready) -> None:
    location = ready.copied(tmp_path / "store")
    with lent(location, append_only=True) as backend, open_store(backend) as store:
        assert plan_gc(store).merges
        collect_now(store)
        assert objects(LocalBackend(location))["bundles"] == 0
        with pytest.raises(RefusedError, match="append-only"):
            backend.write(f"bundles/{'0' * 32}-1")
    with open_store(str(location)) as store:
        require_all(store, ready.made)


def test_the_format_is_3_before_anything_is_merged_and_stays(tmp_path: Path) -> None:
    keys = []
    for name in ("one", "two", "three"):
        make_key_file(tmp_path / name)
        keys.append(KeySource(KeyHolder.FILE, str(tmp_path / name)))
    location = tmp_path / "store"
    with create_store(str(location), keys[0]) as store:
        add_key(store.opened.backend, keys[0], keys[1], "second")
    with open_store(str(location), keys[1]) as store:
        before = store.config
        assert before.format == KEYS
        made = make_small(store, MANY_PACKS)
        collect_now(store)
        assert read_config(store.opened.backend).format == MERGED
        assert not store.opened.backend.list_holdings().bundles
        # A check of a command that has opened it before does not make it what it was.
        require_whole(store)
        assert read_config(store.opened.backend).format == MERGED
    with open_store(str(location), keys[0]) as store:
        assert collect_now(store).bundles == 1
        rotate_key(store.opened.backend, keys[0], keys[2], "third")
    with open_store(str(location), keys[2]) as store:
        assert (store.config.format, store.config.revision) == (MERGED, 2)
        require_all(store, made)
        # A backup of before, and an exported file.
        restore_backup(store.opened.backend, before, keys[1], replace=True)
        with new_archive(tmp_path / "file", store) as archive:
            copy_checkpoints(store, archive, store.manifests()[-1:])
    with open_store(str(location), keys[1]) as store:
        assert store.config.format == MERGED
        require_all(store, made)
    with open_store(str(tmp_path / "file"), keys[2]) as archive:
        assert archive.config.format == KEYS


class Older(LocalBackend):
    """Lent by a version that knows no bundles."""

    def names(self, folder: str) -> dict[str, int]:
        if folder == "bundles":
            raise UsageError("a store has nothing called 'bundles'", why="-", remedy="-")
        return super().names(folder)


def test_a_lent_store_of_an_older_version_is_used_as_before(tmp_path: Path, ready: Ready) -> None:
    location = tmp_path / "store"
    create_store(str(location)).close()
    with open_store(Older(location)) as store:
        made = make_small(store, MANY_PACKS)
        collect_now(store)
        require_all(store, made)
        assert read_config(store.opened.backend).format == ONE_KEY


def test_an_older_version_that_lends_a_store_while_it_is_merged_hides_no_pack(
    tmp_path: Path, ready: Ready
) -> None:
    """What was merged would seem to be lost, and `repair --remove-lost` would remove it all."""
    location = tmp_path / "store"
    create_store(str(location)).close()
    with open_store(Older(location)) as lent_store:
        made = make_small(lent_store, MANY_PACKS)
        for bundles in (0, 1):
            with open_store(str(location)) as store:
                assert collect_now(store).bundles == bundles
        for command in (check, plan_repair, plan_gc, lambda one: one.begin("vm")):
            with pytest.raises(UsageError, match="bundles"):
                command(lent_store)
    with open_store(str(location)) as store:
        require_all(store, made)


def test_nothing_is_merged_for_the_first_time_while_a_checkpoint_is_read(
    tmp_path: Path, ready: Ready
) -> None:
    """By a command of an older version, perhaps, that knows no bundles."""
    location = ready.copied(tmp_path / "store")
    with open_store(str(location)) as reader, open_store(str(location)) as store:
        with reader.read(ready.made[0].manifest.id):
            assert not collect_now(store).bundles
        with reader.read(ready.made[0].manifest.id):
            assert not objects(store.opened.backend)["bundles"]
        assert collect_now(store).bundles == 1
        require_all(reader, ready.made)


def test_a_pack_that_leaves_its_bundle_while_a_reader_lists_is_found(
    tmp_path: Path, ready: Ready, merged: Ready
) -> None:
    """Two gcs wrote it again and removed the bundle, between two listings of one look."""
    location = merged.copied(tmp_path / "store")

    class Moving(LocalBackend):
        moved = False

        def versions(self, folder: str) -> dict[str, tuple[int, str]]:
            found = super().versions(folder)
            if folder == "packs" and not self.moved:
                self.moved = True
                for bundle in (location / "bundles").glob("[0-9a-f]*"):
                    bundle.unlink()
                shutil.copytree(ready.location / "packs", location / "packs", dirs_exist_ok=True)
            return found

    with open_store(Moving(location)) as store:
        require_one(store, *merged.made[-1])


def test_a_listing_with_bundles_that_are_gone_is_not_read_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: Ready
) -> None:
    class Behind(LocalBackend):
        """Object storage whose listings are old."""

        def names(self, folder: str) -> dict[str, int]:
            gone = {f"{'0' * 32}-1": 1000} if folder == "bundles" else {}
            return super().names(folder) | gone

    monkeypatch.setattr(bundled, "_PAUSE_S", 0.0)
    with (
        open_store(Behind(merged.copied(tmp_path / "store"))) as store,
        pytest.raises(StorageError, match="not there"),
    ):
        plan_gc(store)


def test_what_a_bundle_says_is_data(tmp_path: Path, ready: Ready) -> None:
    pack = "0" * 32
    for rows in (
        [["../store", 0, 100, 10]],
        [[pack, -1, 100, 10]],
        [[pack, 0, 100, 90]],
        [[pack, 0, 1 << 60, 10]],
        [[pack, 0, 100, 10], [pack, 0, 100, 10]],
        [[pack, 0, 100]],
        {"a": 1},
        5,
    ):
        location = ready.copied(tmp_path / "store")
        with open_store(str(location)) as store:
            write_bundle(store, rows)
            held = store.opened.backend.list_holdings()
            assert not held.bundles
            assert len(held.unreadable) == 1
            require_one(store, *ready.made[-1])
            assert not check(store).lost
            collect_now(store)
            require_whole(store)
        shutil.rmtree(location)


def write_bundle(store: Store, rows: object, content_bytes: int = 100) -> None:
    """A bundle with that list, sealed as it should be; its content is a hole."""
    name = f"bundles/{'1' * 32}-7"
    head = store.opened.files.header(header.FileKind.BUNDLE).new()
    seal = store.opened.sealer.file(head, name)
    text = compress(json.dumps(rows).encode(), 3)
    first, second = seal.seal(Box.LIST, 0, text), seal.seal(Box.LIST, 1, text)
    length = len(first).to_bytes(4)
    store.opened.files.write(name, [head, length, first, bytes(100), second, head, length])
    if content_bytes > 100:
        path = Path(store.location) / name
        end = path.read_bytes()[len(head + length + first) + 100 :]
        with path.open("r+b") as file:
            file.truncate(len(head + length + first) + content_bytes)
            file.seek(0, os.SEEK_END)
            file.write(end)
