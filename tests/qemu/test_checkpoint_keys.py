"""Checkpoints in an encrypted store: the key stays with the operator, its secret in memory."""

import asyncio
from pathlib import Path

import pytest

from tests.jobs import at_work
from tests.qemu.test_checkpoint import all_there, guest, kill_service, load, sound
from tests.qemu.world import World, qemu, world
from tests.waiting import eventually
from vmckpt.store.open import open_store
from vmckpt.store.sealing.keys import KeyHolder, KeySource


@pytest.mark.timeout(300)
def test_the_secret_is_in_memory_alone_and_outlives_whoever_brings_pages() -> None:
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        asyncio.run(_sealed(made))


async def _sealed(made: World) -> None:
    control = await guest().control(made.lab)
    await load(control)
    await control.close()
    key = str(made.state_dir / "store.key")
    location = str(made.state_dir / "sealed")
    early = made.vmckpt("checkpoint", "create", "guest", "--store", location, "--key-file", key)
    assert (early.code, Path(location).exists()) == (3, False)
    made.ok("store", "init", location, "--key-file", key)
    refused = made.vmckpt("checkpoint", "create", "guest", "--store", location)
    assert (refused.code, refused.error["what"]) == (4, "the store is encrypted")
    opened = ("--store", location, "--key-file", key)
    taken = made.ok("checkpoint", "create", "guest", "--name", "one", *opened)
    second = made.ok("checkpoint", "create", "guest", "--name", "two", *opened)
    assert second["parent"] == taken["id"]
    # Without the key the others are listed, and it is said that this store is not.
    assert [one["what"] for one in made.ok("checkpoint", "list")["silent"]] == [
        "the store is encrypted"
    ]
    command = made.begin("checkpoint", "restore", "one", "--in-place", *opened)
    # Killed before it has taken its key, with whoever gave it, it leaves that for ten minutes.
    await asyncio.to_thread(eventually, lambda: _is_at_work(made), 30.0, "the service has its key")
    await kill_service(made, command, 0.2)
    shown = await asyncio.to_thread(made.vmckpt, "vm", "show", "guest")
    assert shown.code in (0, 5), shown
    await sound(made)
    await asyncio.to_thread(made.ok, "checkpoint", "restore", "two", "--in-place", *opened)
    with open_store(location, KeySource(KeyHolder.FILE, key)) as store:
        secret = store.opened.secret
    _require_nowhere(made, secret)
    await sound(made)
    await all_there(made, "guest")
    forked = await asyncio.to_thread(made.ok, "fork", "one", "--count", "1", *opened)
    assert [one["error"] for one in forked["forks"]] == [""]
    # One that is saved as a whole is in memory too before it is sealed.
    whole = await asyncio.to_thread(
        made.ok, "checkpoint", "create", "guest", "--kind", "file", *opened
    )
    await asyncio.to_thread(made.ok, "checkpoint", "restore", whole["id"], "--in-place", *opened)
    await sound(made)
    assert not list(Path("/dev/shm").glob("vmckpt-*/saved"))
    _require_no_key(made)
    listed = made.ok("checkpoint", "list", *opened)["checkpoints"]
    assert [one["id"] for one in listed] == [taken["id"], second["id"], whole["id"]]


def _is_at_work(made: World) -> bool:
    return bool(at_work(made.state_dir)) and not _keys(made)


def _require_no_key(made: World) -> None:
    assert _keys(made) == []


def _keys(made: World) -> list[str]:
    """Files in memory that have what opens the store; other tests may have theirs there."""
    state = made.state("lab-a")
    own = [path.name for path in (*state.glob("jobs/*/*"), *state.glob("vms/*/qemu-*"))]
    found = (*Path("/dev/shm").glob("vmckpt-key-*"), *Path("/dev/shm").glob("vmckpt-*/key"))
    keys = [str(path) for path in found]
    return [key for key in keys if any(one.removeprefix("qemu-") in key for one in own)]


def _require_nowhere(made: World, secret: bytes) -> None:
    """No file on a disk and no command line has what opens the store."""
    words = [secret.hex().encode(), secret]
    files = [path for path in made.state_dir.rglob("*") if path.is_file()]
    for path in (*files, *Path("/proc").glob("[0-9]*/cmdline")):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        assert not any(word in data for word in words), path
