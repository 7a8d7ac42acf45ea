"""A process ends, or its disk fails, at any of its changes to a store's files: nothing is lost, or
called lost, then, and what fails is a typed error.

After each such end the commands that users run next run in changing orders: check, gc, repair with
`--remove-lost`, the same content stored again. After each of them everything is read bit by bit.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.small_packs import Killed, Made, add, collect_now, make_small, require_one
from vmckpt.errors import RefusedError, VmckptError
from vmckpt.store.backends.local import LocalBackend
from vmckpt.store.bundles import merging
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.damage.repair import plan_repair, repair
from vmckpt.store.files.config import allow_bundles
from vmckpt.store.keyring import rotate_key
from vmckpt.store.open import create_store, new_archive, open_store
from vmckpt.store.sealing.keys import KeyHolder, KeySource, make_key_file
from vmckpt.store.store import Store

CALLS = ("write", "rename", "unlink", "link", "ftruncate", "mkdir")
LONG = [pytest.mark.long, pytest.mark.timeout(1800)]


class Ending:
    """What becomes of change number `at` below a directory, and of those after it. It is counted.

    A process that ends makes none of them. A disk fails once, or takes no change from then on.
    """

    def __init__(self, how: str, below: Path, at: int) -> None:
        self.how, self.below, self.at, self.count = how, str(below), at, 0

    @contextmanager
    def within(self) -> Iterator[None]:
        """For the block."""
        with pytest.MonkeyPatch.context() as patch, suppress(Killed, VmckptError):
            for name in CALLS:
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            yield
        # An export's file is unlinked before it is closed: its lock would outlive "the process".
        for one in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if one.readlink().name.endswith(".partial"):
                    os.close(int(one.name))

    @property
    def came(self) -> bool:
        """Whether there were so many changes."""
        return self.count >= self.at

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(what: Any, *rest: Any, **more: Any) -> Any:
            folder = more.get("dir_fd", more.get("src_dir_fd"))
            fd = what if isinstance(what, int) else folder
            path = Path(what) if fd is None else Path(f"/proc/self/fd/{fd}").readlink()
            if not str(path).startswith(self.below):
                return call(what, *rest, **more)
            self.count += 1
            if self.count == self.at and name == "write" and len(rest[0]) > 1:
                call(what, rest[0][: len(rest[0]) // 2])
            if self.count >= self.at and self.how == "ends":
                raise Killed
            if self.count == self.at or (self.count > self.at and self.how == "read-only"):
                raise OSError(errno.EROFS if self.how == "read-only" else errno.EIO, "no change")
            return call(what, *rest, **more)

        return wrapped


class World:
    """A store, and what is in it. `lost` ones cannot be restored; `may_go` may be there or not."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.location = folder, folder / "store"
        self.made: list[Made] = []
        self.lost: set[str] = set()
        self.may_go: set[str] = set()
        self.keys = [KeySource(KeyHolder.FILE, str(folder.parent / f"key-{n}")) for n in (0, 1)]

    def open(self) -> Store:
        for key in self.keys:
            with suppress(RefusedError):
                return open_store(str(self.location), key)
        raise AssertionError("no key opens it")

    def copied(self, to: Path) -> "World":
        shutil.copytree(self.folder, to)
        other = World(to)
        other.keys, other.made = self.keys, self.made
        other.lost, other.may_go = self.lost, self.may_go
        return other

    def require_all(self) -> None:
        with self.open() as store:
            there = set(store.ids())
            for one in self.made:
                is_lost = one.manifest.id in self.lost
                if one.manifest.id not in there:
                    assert is_lost or one.manifest.id in self.may_go, one.manifest.id
                elif not is_lost:
                    require_one(store, *one)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "MANY", 3)
        patch.setattr(merging, "MANY_UNUSED", 1)
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Packs in a bundle that is worn, loose ones to merge, one to write again."""
    folder = tmp_path_factory.mktemp("worlds")
    for number in (0, 1):
        make_key_file(folder / f"key-{number}")
    world = World(folder / "whole")
    world.folder.mkdir()
    with create_store(str(world.location), world.keys[0]) as store:
        allow_bundles(store.opened.backend)
    with world.open() as store:
        old = make_small(store, 5, seed=1, vm="a")
        assert collect_now(store).bundles == 1
        store.remove([old[1].manifest.id, old[2].manifest.id])
        new = make_small(store, 5, seed=2, vm="b")
        store.remove([new[0].manifest.id])
        world.made = [old[0], *old[3:], *new[1:]]
    return world


def flip(world: World, name: str) -> None:
    """One bit of the first frame of a pack's object."""
    with world.open() as store:
        pack = store.opened.packs.find(bytes.fromhex(name))
        at = int(pack.table.starts[0] + pack.table.stored[0] // 2)
        path = world.location / pack.name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def damaged(world: World) -> World:
    """Some packs can be healed, one cannot."""
    broken = world.copied(world.folder.with_name("damaged"))
    *_, healed, lost = broken.made
    with broken.open() as store:
        packs = [one.manifest.packs for one in broken.made]
    mine = set(lost.manifest.packs) - set(healed.manifest.packs)
    theirs = set(healed.manifest.packs) - {p for some in packs[:-2] for p in some}
    for name in (*mine, *theirs):
        flip(broken, name)
    with broken.open() as store:
        assert lost.manifest.id in check(store).lost
        again = Made(add(store, healed.ram, np.arange(len(healed.ram)), vm="again"), healed.ram)
    broken.made = [*broken.made, again]
    broken.lost = {lost.manifest.id}
    with broken.open() as store:
        assert set(check(store).lost) == broken.lost
    return broken


def checked(world: World) -> None:
    with world.open() as store:
        assert check(store).lost.keys() <= world.lost


def collected(world: World) -> None:
    with world.open() as store:
        collect_now(store)
        assert not store.opened.backend.leftovers()


def repaired(world: World) -> None:
    with world.open() as store:
        done = repair(store, plan_repair(store), remove_lost=True)
        assert set(done.removed) <= world.lost
        assert not done.restorable
        assert not done.refused


def stored(world: World) -> None:
    last = world.made[-1]
    with world.open() as store:
        world.made = [
            *world.made,
            Made(add(store, last.ram, np.arange(len(last.ram)), vm="later"), last.ram),
        ]


NEXT = list(permutations((checked, collected, repaired, stored)))


def go_on(world: World, at: int) -> None:
    """What users do next, and all that is there is right after each of it."""
    world.require_all()
    for command in NEXT[at % len(NEXT)]:
        command(world)
        world.require_all()
    collected(world)
    collected(world)
    world.require_all()
    with world.open() as store:
        report = check(store)
        assert report.whole, (report.findings, report.lost)


@pytest.fixture(
    params=[
        ("ends", 37),
        *(pytest.param(one, marks=LONG) for one in (("ends", 1), ("fails", 1), ("read-only", 3))),
    ],
    ids=lambda one: f"{one[0]}-{one[1]}",
)
def everywhere(request: pytest.FixtureRequest, tmp_path: Path) -> "Everywhere":
    return Everywhere(tmp_path, *request.param)


class Everywhere:
    """Runs something to each of its changes, or each so many, and what follows."""

    def __init__(self, folder: Path, how: str, step: int) -> None:
        self.folder, self.how, self.step = folder, how, step

    def run(
        self, world: World, work: Callable[[World], object],
        after: Callable[[World], None] = lambda world: None, step: int = 100,
    ) -> None:  # fmt: skip
        """Each time with a copy of the world."""
        step = min(step, self.step)
        for at in count(1 + step // 2, step):
            mine = world.copied(self.folder / str(at))
            ending = Ending(self.how, mine.folder, at)
            with ending.within():
                work(mine)
            after(mine)
            go_on(mine, at)
            shutil.rmtree(mine.folder)
            if not ending.came:
                break


def gc(world: World) -> None:
    with world.open() as store:
        plan = plan_gc(store)
        assert plan.rewrites
        assert plan.merges
        assert collect(store, plan).bundles


def test_gc_ends_anywhere(everywhere: Everywhere, world: World) -> None:
    everywhere.run(world, gc)


def test_a_repair_ends_anywhere(everywhere: Everywhere, damaged: World) -> None:
    everywhere.run(damaged, repaired)


def test_a_rotation_ends_anywhere(everywhere: Everywhere, world: World) -> None:
    def rotate(one: World) -> None:
        rotate_key(LocalBackend(one.location), one.keys[0], one.keys[1], "")

    everywhere.run(world, rotate, step=7)


def test_a_copy_ends_anywhere(everywhere: Everywhere, world: World) -> None:
    """Into a store that has half of it."""
    half = world.copied(everywhere.folder / "half")
    with half.open() as store:
        store.remove([one.manifest.id for one in world.made[1::2]])
        collect_now(store)
    half.may_go = {one.manifest.id for one in world.made[1::2]}

    def copy(one: World) -> None:
        with world.open() as source, one.open() as target:
            copy_checkpoints(source, target, source.manifests())

    everywhere.run(half, copy)


def test_an_export_ends_anywhere_and_so_does_an_import(
    everywhere: Everywhere, world: World
) -> None:
    file = everywhere.folder / "file"

    def export(one: World) -> None:
        with one.open() as source, new_archive(one.folder / "file", source) as target:
            copy_checkpoints(source, target, source.manifests())

    def exported(one: World) -> None:
        if not (one.folder / "file").exists():
            export(one)
        with open_store(str(one.folder / "file"), one.keys[0]) as store:
            assert check(store).whole
            for made in world.made:
                require_one(store, *made)
        assert not list(one.folder.glob(".*.partial"))

    everywhere.run(world, export, exported)
    with world.open() as source, new_archive(file, source) as target:
        copy_checkpoints(source, target, source.manifests())
    empty = world.copied(everywhere.folder / "empty")
    with empty.open() as store:
        store.remove(store.ids())
        collect_now(store)
    empty.may_go = {one.manifest.id for one in world.made}

    def import_(one: World) -> None:
        with open_store(str(file), one.keys[0]) as source, one.open() as target:
            copy_checkpoints(source, target, source.manifests())

    everywhere.run(empty, import_)
