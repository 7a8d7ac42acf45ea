"""Two paths between a real guest's primary and its standby, and what the loss of each comes to."""

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from tests.counting import Counting
from tests.qemu.world import World, image, qemu, world
from tests.waiting import eventually
from vmckpt.hosts.processes.process import find_by_argument
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.network import set_link

NAME = "guest"
MIGRATION, SECOND = "mig", "lan"


@pytest.mark.timeout(300)
def test_a_lost_path_is_no_failover_and_is_said_and_without_both_the_lease_decides() -> None:
    """The cables of lab-b, where the standby is, are pulled: the one, the other, and both."""
    guest = LabGuest(NAME, 1, image(), memory="96M", disk=None)
    with world(qemu("10.0"), qemu("10.0")) as made:
        made.run_guest(guest, "lab-a")
        try:
            asyncio.run(lose_each_path(made, guest))
        finally:
            made.vmckpt("replicate", "stop", NAME)


async def lose_each_path(made: World, guest: LabGuest) -> None:
    control = await guest.control(made.lab)
    await control.load_memory("rate=5M set=16M pattern=uniform content=random")
    counting = Counting(await guest.key_value(made.lab))
    try:
        begun = await in_thread(made.ok, "replicate", "start", NAME, "lab-b")
        assert begun["warnings"] == []
        assert begun["paths"] == {"replication": "heard", "second": "heard"}
        await the_second(made, counting)
        await the_connection(made, counting)
        await in_thread(made.ok, "replicate", "start", NAME, "lab-b")
        await both(made, counting)
    finally:
        await counting.end()
    memory = await control.verify_memory()
    assert memory.sound, memory
    await control.close()


async def the_second(made: World, counting: Counting) -> None:
    """The guest goes on protected."""
    await set_link(made.lab, "lab-b", up=False, network=SECOND)
    await until(lambda: paths(made) == {("heard", "silent")}, "both sides say so")
    before = sides(made)["primary"]
    assert before["state"] == "protected"
    await counting.more_than(counting.answers + 20)
    await set_link(made.lab, "lab-b", up=True, network=SECOND)
    await until(lambda: paths(made) == {("heard", "heard")}, "and that it is back")
    now = sides(made)["primary"]
    assert (now["state"], now["run"]) == ("protected", before["run"])
    assert now["acknowledged_epoch"] > before["acknowledged_epoch"]
    await until(lambda: second_as_told(made)[-2:] == ["silent", "heard"], "it is told")


async def the_connection(made: World, counting: Counting) -> None:
    """The guest goes on alone, on lab-a; what is lost is named, by both sides."""
    told = await ended_without(made, MIGRATION)
    assert (
        "lab-b is alive, as heartbeats at 10.77.2.1 show: only the connection"
        in told["primary"]["why"]
    )
    assert (
        "lab-a is alive, as heartbeats at 10.77.2.2 show: only the connection"
        in told["standby"]["why"]
    )
    await stays_at_home(made, counting)


async def both(made: World, counting: Counting) -> None:
    """The primary reaches the arbiter, has it that it is alone, and keeps the guest."""
    told = await ended_without(made, SECOND, MIGRATION)
    assert "no heartbeats of lab-b arrive at 10.77.2.1 either" in told["primary"]["why"]
    assert "this replica is not in sync: it must not take over" in told["standby"]["why"]
    await stays_at_home(made, counting)


async def ended_without(made: World, *networks: str) -> dict[str, Any]:
    """How both services ended when lab-b's cables to these networks were pulled."""
    for network in networks:
        await set_link(made.lab, "lab-b", up=False, network=network)
    await until(partial(have_ended, made), "both services end")
    for network in networks:
        await set_link(made.lab, "lab-b", up=True, network=network)
    told = sides(made)
    assert told["primary"]["ending"] == "alone"
    return told


async def stays_at_home(made: World, counting: Counting) -> None:
    await counting.more_than(counting.answers + 20)
    assert made.ok("vm", "show", NAME)["host"] == "lab-a"
    await until(lambda: len(made.qemus(NAME)) == 1, "and nowhere else")


def have_ended(made: World) -> bool:
    marks = (f"replica\0{role}\0{made.state_dir}" for role in ("primary", "standby"))
    return not any(find_by_argument(mark) for mark in marks)


def sides(made: World) -> dict[str, Any]:
    return {side["role"]: side for side in made.ok("replicate", "status", NAME)["sides"]}


def paths(made: World) -> set[tuple[str, str]]:
    """How each path is, as both sides say."""
    told = [side["paths"] for side in sides(made).values()]
    return {(one["replication"], one["second"]) for one in told}


def second_as_told(made: World) -> list[str]:
    """How the primary found the second path, event by event."""
    command = made.begin("replicate", "events", NAME)
    out, _ = command.communicate(timeout=60)
    told = [json.loads(line) for line in out.splitlines()]
    return [event["paths"]["second"] for event in told if event["role"] == "primary"]


async def in_thread(work: Any, *words: str) -> Any:
    return await asyncio.to_thread(work, *words)


async def until(true: Any, what: str) -> None:
    """While the client counts on."""
    await asyncio.to_thread(eventually, true, 60, what)
