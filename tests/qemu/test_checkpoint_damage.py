"""Real guests whose checkpoints' store is damaged, or full: never another guest than it was."""

import asyncio
import hashlib
import random
import subprocess
from pathlib import Path

import pytest

from tests.qemu.test_checkpoint import all_there, load, sound, take
from tests.qemu.world import Done, World, image, qemu, world
from vmckpt.checkpoint.catalogue.location import own_location
from vmckpt.checkpoint.facts import DEVICES, usable_facts
from vmckpt.errors import VmckptError
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.store.open import open_store

FLIPS, EVERY = 250, 25
KINDS = ("store", "checkpoints", "maps", "packs")


def guest() -> LabGuest:
    return LabGuest("guest", 1, image(), memory="128M", disk="32M")


def read_as_restores_do(location: str, checkpoint_id: str) -> str:
    """All that a restore reads of a checkpoint, and its digest. Raises VmckptError."""
    digest = hashlib.sha256()
    with open_store(location) as store, store.read(checkpoint_id) as point:
        digest.update(repr(usable_facts(point.manifest)).encode())
        digest.update(point.blob(DEVICES))
        for facts in point.manifest.areas:
            area = point.area(facts.name)
            digest.update(area.numbers().tobytes())
            digest.update(area.read(area.numbers()))
    return digest.hexdigest()


class Flipped:
    """A bit of a file of a store, the other way round for the block."""

    def __init__(self, path: Path, at: int, bit: int) -> None:
        self._path, self._at, self._bit = path, at, bit

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *error: object) -> None:
        self._flip()

    def _flip(self) -> None:
        with self._path.open("r+b") as file:
            file.seek(self._at)
            byte = file.read(1)[0]
            file.seek(self._at)
            file.write(bytes([byte ^ 1 << self._bit]))


def some_bit(location: Path, rng: random.Random, kind: str) -> Flipped:
    """Half of them at the ends of files, where the formats' own bytes are."""
    files = sorted(p for p in location.rglob("*") if p.is_file() and p.stat().st_size)
    path = rng.choice([p for p in files if p.relative_to(location).parts[0] == kind])
    size = path.stat().st_size
    ends = [*range(min(200, size)), *range(max(0, size - 200), size)]
    at = rng.choice(ends) if rng.random() < 0.5 else rng.randrange(size)
    return Flipped(path, at, rng.randrange(8))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_make_no_other_guest(seed: int) -> None:
    """250 flips each, of every kind of file, against all that a restore reads; 10 restores."""
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        asyncio.run(_flip_many(made, random.Random(seed)))


async def _flip_many(made: World, rng: random.Random) -> None:
    control = await guest().control(made.lab)
    await load(control)
    taken = [await take(made) for _ in range(2)]
    location = Path(own_location(made.state("lab-a")))
    right = [read_as_restores_do(str(location), one["id"]) for one in taken]
    refused = unharmed = 0
    for number in range(FLIPS):
        which = rng.randrange(2)
        with some_bit(location, rng, KINDS[number % len(KINDS)]):
            try:
                assert read_as_restores_do(str(location), taken[which]["id"]) == right[which]
                unharmed += 1
            except VmckptError:
                refused += 1
            if number % EVERY == EVERY - 1:
                await _restored_while_damaged(made, taken[which]["id"])
        if number % EVERY == EVERY - 1:
            await _as_it_was(made, taken[which]["id"])
    print(f"{FLIPS} flips: {refused} refused, {unharmed} unharmed")
    assert refused
    await control.close()


async def _restored_while_damaged(made: World, checkpoint_id: str) -> None:
    """It is refused and the guest goes on, or it is the guest; or it was ended, which is said."""
    words = ("checkpoint", "restore", checkpoint_id, "--in-place")
    done = await asyncio.to_thread(made.vmckpt, *words)
    if done.code:
        assert done.error["exit_code"] in (3, 4, 7, 11), done
        await sound(made)
        return
    while True:
        shown = await asyncio.to_thread(made.vmckpt, "vm", "show", "guest")
        assert shown.code == 0, shown
        if shown.result["operation"] is None:
            break
        await asyncio.sleep(0.2)
    if shown.result["state"] == "running":
        await sound(made)
    else:
        lost = await asyncio.to_thread(made.vmckpt, "checkpoint", "create", "guest")
        assert lost.code != 0


async def _as_it_was(made: World, checkpoint_id: str) -> None:
    words = ("checkpoint", "restore", checkpoint_id, "--in-place")
    await asyncio.to_thread(made.ok, *words)
    await sound(made)
    await all_there(made, "guest")


@pytest.mark.timeout(120)
@pytest.mark.long
def test_the_next_checkpoint_rests_on_nothing_that_the_store_has_lost() -> None:
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        asyncio.run(_taken_after_a_loss(made))


async def _taken_after_a_loss(made: World) -> None:
    control = await guest().control(made.lab)
    await load(control)
    await asyncio.sleep(1.0)
    first = await take(made)
    for pack in (Path(own_location(made.state("lab-a"))) / "packs").glob("[0-9a-f]*"):
        pack.unlink()
    second = await take(made)
    assert second["parent"] == first["id"]
    assert "packs are missing or damaged" in second["damaged"]
    assert (await take(made))["damaged"] is None
    await control.close()
    await _as_it_was(made, second["id"])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_full_disk_at_any_moment_is_the_checkpoints_end_and_not_the_guests() -> None:
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        room = made.shared / "room"
        room.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "room", str(room)], check=True)
        try:
            asyncio.run(_full(made, room))
        finally:
            subprocess.run(["umount", "--lazy", str(room)], check=True)


async def _full(made: World, room: Path) -> None:
    control = await guest().control(made.lab)
    await load(control)
    location, size_bytes, failed = room / "store", 4096, 0
    try:
        while (done := await _take_into(made, location)).code:
            assert done.error["exit_code"] == 11, done
            assert "No space left" in done.error["why"], done
            failed += 1
            assert (await control.stat()).mem_errors == 0
            # Every file that it comes to is met by a disk that is full.
            size_bytes = size_bytes * 2 if size_bytes < 1 << 20 else size_bytes + (8 << 20)
            _resize(room, size_bytes)
        assert failed > 8
        first = done.result["id"]
        _resize(room, size_bytes + 4096)
        again = await _take_into(made, location)
        assert again.code == 0 or "No space left" in again.error["why"], again
        checked = await asyncio.to_thread(made.ok, "store", "check", str(location))
        assert checked["whole"], checked
        words = ("checkpoint", "restore", first, "--in-place", "--store", str(location))
        await asyncio.to_thread(made.ok, *words)
        await sound(made)
        await all_there(made, "guest")
    finally:
        await control.close()


def _resize(room: Path, size_bytes: int) -> None:
    options = f"remount,size={size_bytes}"
    subprocess.run(["mount", "-o", options, str(room)], check=True)


async def _take_into(made: World, location: Path) -> Done:
    # Where it is not there yet: what was begun of it on a full disk has gone.
    begun = await asyncio.to_thread(made.vmckpt, "store", "init", str(location))
    if begun.code not in (0, 4):
        return begun
    words = ("checkpoint", "create", "guest", "--store", str(location))
    return await asyncio.to_thread(made.vmckpt, *words)
