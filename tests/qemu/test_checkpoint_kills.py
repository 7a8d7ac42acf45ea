"""A checkpoint, a restore or forks whose service is killed at a chosen moment: nothing is left."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.jobs import at_work
from tests.qemu.test_checkpoint import all_there, guest, kill_service, load, sound, take
from tests.qemu.world import World, qemu, world
from tests.waiting import eventually
from vmckpt.qemu import block
from vmckpt.qemu.monitor import session
from vmckpt.vm.inventory import read_vm

pytestmark = pytest.mark.timeout(180)

SETTLED_S = 30.0


async def killed_once(made: World, true: Callable[[], object], *words: str) -> None:
    """Run a command whose service on the host is killed as soon as `true()` holds."""
    command = made.begin(*words)
    while not true():
        assert command.poll() is None, command.communicate()
        await asyncio.sleep(0.0005)
    await kill_service(made, command, 0.0)


def recovered(made: World) -> bool:
    """Whether no service works any longer, nor what comes after its death."""
    return not at_work(made.state_dir)


def vms(made: World) -> dict[str, str]:
    """All VMs, and how they are."""
    return {vm["name"]: vm["state"] for vm in made.ok("vm", "list")["vms"]}


@contextmanager
def with_checkpoint() -> Iterator[World]:
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")

        async def begin() -> None:
            control = await guest().control(made.lab)
            await load(control)
            await control.close()
            await take(made, "--name", "point")

        asyncio.run(begin())
        yield made


@pytest.mark.parametrize("was_paused", [False, True])
def test_a_restore_in_place_that_dies_over_its_disks_leaves_none(*, was_paused: bool) -> None:
    with with_checkpoint() as made:
        if was_paused:
            made.ok("vm", "pause", "guest")
        before = made.qemus()

        def made_disks() -> list[Path]:
            return list(made.shared.glob("*.vmckpt-*"))

        words = ("checkpoint", "restore", "point", "--in-place", "--eager")
        asyncio.run(killed_once(made, made_disks, *words))
        eventually(lambda: recovered(made) and not made_disks(), SETTLED_S, "nothing is left")
        assert not list(made.state("lab-a").glob("vms/guest/restore.json"))
        assert made.qemus() == before
        if was_paused:
            assert vms(made) == {"guest": "paused"}
            made.ok("vm", "resume", "guest")
        asyncio.run(sound(made))


@pytest.mark.parametrize("moment", ["images/copy-0.*", "vms/copy/vm.json"])
def test_a_copy_that_dies_in_the_making_is_not_there_or_runs(moment: str) -> None:
    with with_checkpoint() as made:
        state = made.state("lab-a")
        words = ("checkpoint", "restore", "point", "--as", "copy", "--eager")
        asyncio.run(killed_once(made, lambda: list(state.glob(moment)), *words))
        eventually(lambda: recovered(made), SETTLED_S, "all is settled")
        found = vms(made)
        assert found.pop("guest") == "running"
        assert found in ({}, {"copy": "running"})
        if not found:
            assert not made.qemus("copy")
            assert not list(state.glob("vms/copy")) + list(state.glob("images/copy-*"))
        else:
            asyncio.run(all_there(made, "copy"))
        assert not list(state.glob("vms/*/restore.json"))
        asyncio.run(sound(made))


def test_forks_whose_maker_dies_run_or_are_not_there() -> None:
    with with_checkpoint() as made:
        state = made.state("lab-a")
        words = ("fork", "point", "--count", "3", "--name", "f")
        asyncio.run(killed_once(made, (state / "vms/f-2/vm.json").exists, *words))
        eventually(lambda: recovered(made), SETTLED_S, "all is settled")
        found = vms(made)
        assert {"guest", "f-1", "f-2"} <= found.keys()
        assert set(found.values()) == {"running"}, found
        assert sorted(path.parent.name for path in state.glob("vms/*/vm.json")) == sorted(found)
        assert len(made.qemus()) == len(found)
        assert not list(state.glob("vms/*/restore.json"))
        assert not list(state.glob("images/.*"))
        overlays = {path.name.rpartition("-")[0] for path in state.glob("images/f-*")}
        assert overlays == found.keys() - {"guest"}


def test_disks_of_a_checkpoint_that_died_are_the_guests_alone_again() -> None:
    with with_checkpoint() as made:
        files = made.state("lab-a") / "vms/guest"

        def are_read() -> list[Path]:
            return list(files.glob("qemu-*/disks.sock"))

        asyncio.run(killed_once(made, are_read, "checkpoint", "create", "guest"))
        eventually(lambda: recovered(made), SETTLED_S, "all is settled")
        assert not list(files.glob("qemu-*/old-blocks-*"))
        assert not [name for name in asyncio.run(nodes(made)) if name.startswith("vmckpt-")]
        asyncio.run(sound(made))


async def nodes(made: World) -> list[str]:
    vm = await read_vm(made.asked("lab-a"), "guest")
    assert vm is not None
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        return list(await block.query_disk_images(monitor))


def test_what_was_saved_whole_does_not_stay_in_memory_after_a_kill() -> None:
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        location, key = str(made.shared / "sealed"), str(made.shared / "key")
        sealed = ("--store", location, "--key-file", key)
        made.ok("store", "init", location, "--key-file", key)
        begun = False

        def storing() -> bool:
            nonlocal begun
            stands_still = (made.state("lab-a") / "vms/guest/saving").exists()
            begun |= stands_still
            return begun and not stands_still

        def saved() -> list[Path]:
            return list(Path("/dev/shm").glob("vmckpt-guest-*/saved"))

        words = ("checkpoint", "create", "guest", "--kind", "file", *sealed)
        asyncio.run(killed_once(made, storing, *words))
        eventually(lambda: recovered(made), SETTLED_S, "all is settled")
        assert not saved()
        assert vms(made) == {"guest": "running"}
        made.ok(*words, "--name", "again")
        made.ok("checkpoint", "restore", "again", "--in-place", *sealed)
        assert not saved()
