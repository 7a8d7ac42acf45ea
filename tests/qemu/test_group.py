"""Groups of real guests that talk to each other: every cut is consistent, and is gone back to."""

import asyncio
from typing import Any

import pytest

from tests.qemu.talking import checked, guests, talking
from tests.qemu.world import World, qemu, world

PATIENCE_S = 60.0
HOMES = {"web": "lab-a", "db": "lab-a", "cache": "lab-b"}


async def ok(made: World, *words: str) -> dict[str, Any]:
    return await asyncio.to_thread(made.ok, *words)


@pytest.mark.timeout(300)
def test_a_group_is_one_cut_and_goes_back_to_it_together() -> None:
    with world(qemu("10.0"), qemu("10.0")) as made:
        asyncio.run(_there_and_back(made))


async def _there_and_back(made: World) -> None:
    every = guests(*HOMES)
    async with talking(made, HOMES, every, rate=50) as controls:
        before = 0
        for number in range(3):
            done = await ok(
                made, "checkpoint", "create", "--group", "web,db,cache", "--name", f"cut-{number}",
                "--max-hold", "3s",
            )  # fmt: skip
            wrong, said = checked(made, HOMES, every, done)
            assert not wrong
            assert said > before
            before = said
        for control in controls.values():
            assert (await control.talk()).wrong == 0
    shown = await ok(made, "checkpoint", "show", "--group", "cut-1")
    assert shown["whole"]
    assert list(shown["members"]) == ["web", "db", "cache"]
    back = await ok(made, "checkpoint", "restore", "--group", "cut-1", "--in-place")
    assert {vm: one["host"] for vm, one in back["members"].items()} == HOMES
    for guest in every:
        control = await guest.control(made.lab)
        # The same connections go on: nothing was lost, nothing came twice.
        now = await control.talk()
        given_up_s = asyncio.get_running_loop().time() + PATIENCE_S
        while (later := await control.talk()).tcp_heard < now.tcp_heard + 100:
            assert asyncio.get_running_loop().time() < given_up_s, later
            await asyncio.sleep(0.1)
        assert later.wrong == 0
        await control.close()
