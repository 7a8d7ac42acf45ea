"""Changes of a store's keys, killed at any moment: one of the keys opens it, nothing is lost."""

import multiprocessing
import random
import time
from pathlib import Path

import pytest

from tests.guest_like import memory, require_same, save
from vmckpt.errors import RefusedError
from vmckpt.store.backends.local import LocalBackend
from vmckpt.store.check import check
from vmckpt.store.files.config import NAMES
from vmckpt.store.keyring import rotate_key
from vmckpt.store.open import create_store, open_store
from vmckpt.store.sealing.keys import KeyHolder, KeySource, make_key_file

RAM = memory(16, 1)


def _turn(path: Path, keys: list[KeySource], now: int) -> None:
    """Rotate from one to the other until it is killed."""
    backend = LocalBackend(path)
    while True:
        rotate_key(backend, keys[now], keys[1 - now], "")
        now = 1 - now


def _which(path: Path, keys: list[KeySource]) -> int:
    """The key that opens the store; the other one does not."""
    found = []
    for number, key in enumerate(keys):
        try:
            open_store(str(path), key).close()
        except RefusedError:
            continue
        found.append(number)
    [one] = found
    return one


def _killed(path: Path, rounds: int) -> None:
    keys = []
    for name in ("one", "two"):
        make_key_file(path / name)
        keys.append(KeySource(KeyHolder.FILE, str(path / name)))
    location = path / "store"
    with create_store(str(location), keys[0]) as store:
        manifest = save(store, RAM)
    chosen, now, changed = random.Random(1), 0, 0
    for _ in range(rounds):
        process = multiprocessing.get_context("fork").Process(
            target=_turn, args=(location, keys, now), daemon=True
        )
        process.start()
        time.sleep(chosen.uniform(0.0, 0.06))
        process.kill()
        process.join()
        was, now = now, _which(location, keys)
        changed += was != now
        with open_store(str(location), keys[now]) as store:
            check(store)
            assert check(store).whole
            require_same(store, manifest, RAM)
        assert len({(location / name).read_bytes() for name in NAMES}) == 1
    assert changed


def test_killed_rotations(tmp_path: Path) -> None:
    _killed(tmp_path, 15)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_killed_rotations(tmp_path: Path) -> None:
    _killed(tmp_path, 500)
