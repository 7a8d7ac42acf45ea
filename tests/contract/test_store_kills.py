"""kill -9 at any moment of work on a store: what was there stays, the next command works."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.store_work import make, open_or_create, require_right
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.store import Store

KILLS, MANY_KILLS = 4, 300
# More than there is time for.
ENDLESS = 100000


def kill_once(folder: Path, seed: int, after_s: float) -> list[str]:
    """Let work go on for a moment, then kill it; what it said that it has done."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.store_work", str(folder), str(seed), str(ENDLESS)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process, process.stdout as out:
        # Importing is no work: from the first thing done on.
        said = [out.readline()]
        time.sleep(after_s)
        os.kill(process.pid, signal.SIGKILL)
        said += out.readlines()
    # Else it had ended before, by an error of its own.
    assert process.returncode == -signal.SIGKILL, said
    assert not any(line.startswith("error") for line in said), said
    return [line.strip() for line in said]


def kill_many(folder: Path, count: int) -> None:
    rng = random.Random(1)
    before: dict[str, dict[str, Manifest]] = {"one": {}, "two": {}}
    for i in range(count):
        said = kill_once(folder, i + 1, rng.uniform(0, 0.4))
        removed = {line.split()[1] for line in said if line.startswith("removing")}
        for name, known in before.items():
            with open_or_create(folder / name) as store:
                now = look(store)
                after = go_on(store, now)
            lost = known.keys() - now.keys() - removed
            assert not lost, f"kill {i}: {lost} of {name} are gone"
            if name == "one":
                made = {line.split()[1] for line in said if line.startswith("made")}
                assert made - removed <= now.keys(), f"kill {i}: what was committed is not there"
            before[name] = after
    with open_or_create(folder / "one") as store:
        collect(store, plan_gc(store))
        assert not store.opened.backend.leftovers()


def look(store: Store) -> dict[str, Manifest]:
    """All checkpoints, each found right, in a store that is whole."""
    report = check(store)
    assert report.whole, report.findings
    manifests = store.manifests()
    for manifest in manifests:
        require_right(store, manifest)
    return {manifest.id: manifest for manifest in manifests}


def go_on(store: Store, now: dict[str, Manifest]) -> dict[str, Manifest]:
    """The next commands work; what there is after them."""
    manifests = list(now.values())
    if len(manifests) > 12:
        store.remove([manifest.id for manifest in manifests[:8]])
        manifests = manifests[8:]
    make(store, int(time.time()), manifests[-1] if manifests else None)
    return {manifest.id: manifest for manifest in store.manifests()}


def test_killed_at_random_moments(tmp_path: Path) -> None:
    kill_many(tmp_path, KILLS)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_killed_three_hundred_times(tmp_path: Path) -> None:
    kill_many(tmp_path, MANY_KILLS)
