"""Groups of real guests that talk to each other: every cut is consistent, and is gone back to."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tests.qemu.talking import Witness, conversing, get_on, guests, talking
from tests.qemu.test_adopt import HAND, PLAIN, adopt, by_hand
from tests.qemu.world import World, image, qemu, world
from vmckpt.hosts.processes.process import is_alive
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path

HOMES = {"web": "lab-a", "db": "lab-a", "cache": "lab-b"}
# QEMU itself names such a back end, by a name that it accepts for none of its objects.
HUB = PLAIN.replace(
    "-nic tap,ifname=hand0,script=no,downscript=no,model=virtio",
    "-net nic,model=virtio -net tap,ifname=hand0,script=no,downscript=no",
)


async def ok(made: World, *words: str) -> dict[str, Any]:
    return await asyncio.to_thread(made.ok, *words)


def points(done: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoints' ids of a group, by VM."""
    return {vm: one["id"] for vm, one in done["members"].items()}


@pytest.mark.timeout(300)
def test_a_group_is_one_cut_and_goes_back_to_it_together() -> None:
    with world(qemu("10.0"), qemu("10.0")) as made:
        asyncio.run(_there_and_back(made))


async def _there_and_back(made: World) -> None:
    every = guests(*HOMES)
    async with talking(made, HOMES, every, rate=50) as controls:
        before, witness = 0, Witness(made, HOMES, every)
        for number in range(3):
            done = await ok(
                made, "checkpoint", "create", "--group", "web,db,cache", "--name", f"cut-{number}",
                "--max-hold", "3s",
            )  # fmt: skip
            wrong, said = witness.violations(points(done))
            assert not wrong
            assert said > before
            before = said
        for control in controls.values():
            assert (await control.talk()).wrong == 0
    shown = await ok(made, "checkpoint", "show", "--group", "cut-1")
    assert shown["whole"]
    assert list(shown["members"]) == ["web", "db", "cache"]
    await _none_goes_back_if_one_cannot(made)
    back = await ok(made, "checkpoint", "restore", "--group", "cut-1", "--in-place")
    assert {vm: one["host"] for vm, one in back["members"].items()} == HOMES
    await get_on(made, every)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "style", [pytest.param(PLAIN, id="nic", marks=pytest.mark.long), pytest.param(HUB, id="hub")]
)
def test_a_qemu_that_was_started_by_hand_is_in_a_group(style: str) -> None:
    with world(qemu("10.0"), qemu("10.0")) as made, by_hand(made, style, monitors=3) as process:
        adopt(made)
        assert made.ok("vm", "show", "hand")["cannot"] == []
        asyncio.run(_hand_and_others(made))
        assert not is_alive(process)


async def _hand_and_others(made: World) -> None:
    homes = {"hand": "lab-a", "db": "lab-a", "cache": "lab-b"}
    every = [HAND, LabGuest("db", 2, image(), "128M", disk=None)]
    every.append(LabGuest("cache", 3, image(), "128M", disk=None))
    for guest in every[1:]:
        await asyncio.to_thread(made.run_guest, guest, homes[guest.name])
    async with conversing(made, every, rate=50) as controls:
        witness = Witness(made, homes, every)
        words = ("--group", "hand,db,cache", "--max-hold", "3s")
        for number in range(2):
            done = await ok(made, "checkpoint", "create", *words, "--name", f"cut-{number}")
            wrong, said = witness.violations(points(done))
            assert (wrong, said > 0) == ([], True)
            assert done["members"]["hand"]["held_ms"] > 0
            for control in controls.values():
                assert (await control.talk()).wrong == 0
    await ok(made, "checkpoint", "restore", "--group", "cut-0", "--in-place")
    await get_on(made, every)
    # Its QEMU is vmckpt's now.
    done = await ok(made, "checkpoint", "create", *words, "--name", "cut-2")
    assert witness.violations(points(done))[0] == []
    await get_on(made, every)


async def _none_goes_back_if_one_cannot(made: World) -> None:
    before = {vm: made.pids(vm) for vm in HOMES}
    host = made.asked("lab-b")
    async with host.lock(lock_path(host.state_dir, "cache"), owner("test")):
        words = ("checkpoint", "restore", "--group", "cut-1", "--in-place")
        done = await asyncio.to_thread(made.vmckpt, *words)
    assert done.error["exit_code"] == 5
    assert {vm: made.pids(vm) for vm in HOMES} == before
    for vm in HOMES:
        assert (await ok(made, "vm", "show", vm))["state"] == "running"
