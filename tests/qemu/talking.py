"""Guests that say numbered messages to each other, and what their checkpoints say of it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.qemu.world import World, image
from vmckpt.checkpoint.facts import RAM
from vmckpt.checkpoint.place import own_place
from vmckpt.lab.guest import GuestControl
from vmckpt.lab.labguest import LabGuest
from vmckpt.lab.talk import Counts, Violation, pages_of, parse_page, violations
from vmckpt.store.open import open_store


def guests(*names: str, memory: str = "128M", disk: str | None = None) -> list[LabGuest]:
    return [
        LabGuest(name, number + 1, image(), memory=memory, disk=disk)
        for number, name in enumerate(names)
    ]


@asynccontextmanager
async def talking(
    made: World, homes: Mapping[str, str], every: Sequence[LabGuest], rate: int
) -> AsyncIterator[dict[str, GuestControl]]:
    """Each says `rate` messages a second to each other one, over UDP and TCP, for the block."""
    controls = {}
    for guest in every:
        await asyncio.to_thread(made.run_guest, guest, homes[guest.name])
    try:
        for guest in every:
            controls[guest.name] = await guest.control(made.lab)
        for guest in every:
            others = ",".join(one.address for one in every if one.name != guest.name)
            await controls[guest.name].beat(None)
            await controls[guest.name].talk(f"to={others} rate={rate}")
        for guest in every:
            while (await controls[guest.name].talk()).tcp_heard == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield controls
    finally:
        for control in controls.values():
            await control.close()


def counts_in(
    made: World, homes: Mapping[str, str], every: Sequence[LabGuest], points: Mapping[str, str]
) -> dict[str, Mapping[str, Counts]]:
    """What each had said and heard, out of its checkpoint of `points`, by addresses."""
    found = {}
    for guest in every:
        place = own_place(made.state(homes[guest.name]))
        with open_store(place) as store, store.read(points[guest.name]) as point:
            pieces = (chunks.contents for chunks in point.area(RAM).stream())
            [page] = pages_of(pieces)
        found[guest.address] = parse_page(page)
    return found


def checked(
    made: World, homes: Mapping[str, str], every: Sequence[LabGuest], done: Mapping[str, Any]
) -> tuple[list[Violation], int]:
    """What is wrong with a cut, and how many messages had been said in it."""
    points = {vm: one["id"] for vm, one in done["members"].items()}
    counts = counts_in(made, homes, every, points)
    assert all(len(of_one) == len(every) - 1 for of_one in counts.values()), counts
    wrong = sum(one.wrong for of_one in counts.values() for one in of_one.values())
    assert wrong == 0, counts
    said = sum(one.udp_sent + one.tcp_sent for of_one in counts.values() for one in of_one.values())
    return violations(counts), said
