"""Two writers and a gc on one store, each killed at any moment; answers of the store get lost.

Each is a process (a host of its own) that says in a file, line by line, what it has committed and
what it is about to remove. What checkpoints hold follows from their facts (`tests/store_work.py`).
"""

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.guest_like import RAM
from tests.store_work import Changes, require_right, state
from vmckpt.errors import NotFoundError, StorageError, VmckptError
from vmckpt.store.backends.backend import Backend
from vmckpt.store.backends.local import LocalBackend, LocalWriter
from vmckpt.store.backends.locations import is_url
from vmckpt.store.bundles import merging
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES
from vmckpt.store.open import open_store
from vmckpt.store.store import Store
from vmckpt.store.transaction import Origin, new_id

WRITERS, GC = ("a", "b"), "gc"
IDS = {vm: f"{vm * 8}-{vm * 4}-4{vm * 3}-8{vm * 3}-{vm * 12}" for vm in WRITERS}
# So few contents that both writers share chunks, and gc finds some that neither needs.
CONTENTS, MOST = 12, 6
LOST_RATIO = 0.03
EXPIRY_S, REFRESH_S = 4.0, 0.5
PATIENCE_S = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.store_siege"])


class LossyDirectory(LocalBackend):
    """A shared directory whose answers get lost: what was asked for is done, or is not."""

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__(root)
        self.rng = random.Random(seed)

    def write(self, name: str) -> LocalWriter:
        return LossyWriter(self, name)

    def remove(self, name: str) -> None:
        self.lossy(lambda: super(LossyDirectory, self).remove(name))

    def lossy(self, work: Callable[[], None]) -> None:
        fate = self.rng.random()
        if fate >= LOST_RATIO * 0.3:
            work()
        if fate < LOST_RATIO:
            raise StorageError("the answer was lost", why="as drawn", remedy="-")


class LossyWriter(LocalWriter):
    def publish(self) -> None:
        backend = self._backend
        assert isinstance(backend, LossyDirectory)
        backend.lossy(super().publish)


def backend_at(location: str, seed: int) -> Backend:
    """A host's own way to the store."""
    if not is_url(location):
        return LossyDirectory(Path(location), seed)
    from vmckpt.store.backends.s3 import S3Backend

    return S3Backend(location, expiry_s=EXPIRY_S, refresh_s=REFRESH_S, retries=seed % 2)


def work(location: str, role: str, seed: int, log: str, environment: dict[str, str]) -> None:
    """Until it is killed. An error of the store is said, and the next thing is done."""
    merging.MANY = 2  # so that packs are moved all the time
    cache = str(Path(log).parent / f"cache-{role}")
    os.environ.update(environment, VMCKPT_CACHE_DIR=cache)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    rng = random.Random(seed)

    def say(*words: str) -> None:
        os.write(fd, f"{' '.join(words)}\n".encode())

    say("started", role)
    while True:
        try:
            with open_store(backend_at(location, rng.getrandbits(32))) as store:
                while True:
                    if role == GC:
                        collect(store, plan_gc(store))
                        say("collected")
                        time.sleep(rng.uniform(0, 0.3))  # its lock keeps writers waiting
                    else:
                        write(store, role, rng, say)
        except VmckptError as exc:
            say("error", exc.kind, exc.what.replace("\n", " "))


def write(store: Store, vm: str, rng: random.Random, say: Callable[..., None]) -> None:
    """One more checkpoint; the oldest goes when there are many."""
    mine = store.manifests(vm)
    if len(mine) >= MOST:
        gone = rng.choice(mine[:-1])
        say("removing", gone.id)
        with suppress(NotFoundError):
            store.remove([gone.id])
    parent = rng.choice([None, *mine[-2:]])
    before: Changes = list(parent.facts["changes"])[-3:] if parent else []
    changes = [*before, [rng.randrange(CONTENTS), 20]]
    ram = state(changes)
    origin = Origin(
        new_id(), vm, parent.id if parent else None, None, IDS[vm], time.time_ns() >> 20
    )
    with store.begin(vm, origin.parent, origin=origin) as new:
        area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
        area.put(np.arange(len(ram)), ram.tobytes())
        new.blob("device-state", ram[:2].tobytes())
        new.commit({"changes": changes})
    say("made", new.id)


class Outcome(NamedTuple):
    """What a siege came to."""

    kills: int
    made: int
    removed: int
    collected: int
    errors: int


class Siege:
    """Three processes, killed at random and begun again."""

    def __init__(self, location: str, folder: Path, seed: int, environment: dict[str, str]) -> None:
        self._place, self._folder, self._environment = location, folder, environment
        self._rng, self._number = random.Random(seed), 0
        self._processes: dict[str, ForkServerProcess] = {}
        self.kills = 0

    def run(self, kills: int, *, look_every: int, most_s: float) -> Outcome:
        """So many kills; now and then, and at the end, all is looked at while nothing runs."""
        try:
            while self.kills < kills:
                for role in (*WRITERS, GC):
                    if role not in self._processes:
                        self._begin(role)
                if self.kills % 3 == 0:
                    self._await_a_commit()
                time.sleep(self._rng.uniform(0, most_s))
                self._kill(self._rng.choice([*WRITERS, *WRITERS, GC]))
                if self.kills % look_every == 0:
                    self._kill_all()
                    self._look()
        finally:
            self._kill_all()
        self._look()
        lines = self._lines()
        words = [line[0] for line in lines]
        counts = (words.count(word) for word in ("made", "removing", "collected", "error"))
        return Outcome(self.kills, *counts)

    def _begin(self, role: str) -> None:
        self._number += 1
        log = str(self._folder / f"{self._number}.log")
        process = _CONTEXT.Process(
            target=work, args=(self._place, role, self._number, log, self._environment)
        )
        process.start()
        self._processes[role] = process
        while not Path(log).exists():  # importing is no work
            time.sleep(0.01)

    def _await_a_commit(self) -> None:
        """However slow the machine is, something comes to be there that could be lost."""
        before, until_s = self._made(), time.monotonic() + PATIENCE_S
        while self._made() == before and time.monotonic() < until_s:
            time.sleep(0.05)

    def _made(self) -> int:
        return sum(line[0] == "made" for line in self._lines())

    def _kill(self, role: str) -> None:
        process = self._processes.pop(role)
        assert process.is_alive(), f"{role} has ended by itself"
        process.kill()
        process.join()
        self.kills += 1

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()
        self._processes.clear()

    def _lines(self) -> list[list[str]]:
        logs = sorted(self._folder.glob("*.log"))
        return [line.split() for log in logs for line in log.read_text().splitlines()]

    def _look(self) -> None:
        """All that was committed is there, but for what was being removed, and is right."""
        lines = self._lines()
        made = {line[1] for line in lines if line[0] == "made"}
        removed = {line[1] for line in lines if line[0] == "removing"}
        with open_store(honest(self._place)) as store:
            eventually(lambda: collect(store, plan_gc(store)))
            report = check(store)
            assert report.whole, report.findings
            manifests = {one.id: one for one in store.manifests()}
            lost = made - removed - manifests.keys()
            assert not lost, f"kill {self.kills}: {lost} are gone"
            for manifest in manifests.values():
                require_right(store, manifest)


def honest(location: str) -> Backend:
    """A way to the store on which no answer is lost for good."""
    if not is_url(location):
        return LocalBackend(Path(location))
    from vmckpt.store.backends.s3 import S3Backend

    return S3Backend(location, expiry_s=EXPIRY_S, refresh_s=REFRESH_S, retries=10)


def eventually(work: Callable[[], object]) -> None:
    """Once the locks of the killed have expired."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            work()
            return
        except VmckptError:
            if time.monotonic() > until_s:
                raise
        time.sleep(0.2)
