"""A group whose hosts are reached over SSH: members at work there, their head here."""

import asyncio

import pytest

from tests.qemu.talking import Witness, get_on, guests, talking
from tests.real.machines import Machines

HOMES = {"web": "lab-a", "db": "lab-a", "cache": "lab-b"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_group_over_ssh_is_one_cut_and_goes_back_to_it(real_lab: Machines) -> None:
    try:
        asyncio.run(_there_and_back(real_lab))
    finally:
        for vm in HOMES:
            real_lab.vmckpt("vm", "stop", vm, "--force")
            real_lab.vmckpt("vm", "rm", vm)
        for left in real_lab.shared.iterdir():
            left.unlink()


async def _there_and_back(made: Machines) -> None:
    every = guests(*HOMES, memory="96M")
    async with talking(made, HOMES, every, rate=50) as controls:
        witness = Witness(made, HOMES, every)
        for number in range(3):
            words = ("--group", ",".join(HOMES), "--name", f"cut-{number}", "--max-hold", "3s")
            done = await asyncio.to_thread(made.ok, "checkpoint", "create", *words)
            wrong, said = witness.violations({vm: one["id"] for vm, one in done["members"].items()})
            assert not wrong
            assert said > 0
            print(f"cut {number}: {said} messages, skew {done['skew_ms']} ms, "
                  f"held {done['held_ms']} ms at most")  # fmt: skip
        for control in controls.values():
            assert (await control.talk()).wrong == 0
    back = ("checkpoint", "restore", "--group", "cut-1", "--in-place")
    restored = await asyncio.to_thread(made.ok, *back)
    assert {vm: one["host"] for vm, one in restored["members"].items()} == HOMES
    await get_on(made, every)
