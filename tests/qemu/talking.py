"""Guests that say numbered messages to each other, and what their checkpoints say of it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np

from tests.qemu.world import World, image
from vmckpt.checkpoint.catalogue.location import own_location
from vmckpt.checkpoint.facts import RAM
from vmckpt.lab.guests.guest import GuestControl
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.guests.talk import MAGIC, Counts, Violation, pages_at, parse_page, violations
from vmckpt.store.open import open_store

PATIENCE_S = 60.0


def guests(*names: str, memory: str = "128M", disk: str | None = None) -> list[LabGuest]:
    return [
        LabGuest(name, number + 1, image(), memory=memory, disk=disk)
        for number, name in enumerate(names)
    ]


@asynccontextmanager
async def talking(
    made: World, homes: Mapping[str, str], every: Sequence[LabGuest], rate: int
) -> AsyncIterator[dict[str, GuestControl]]:
    """Run them; each says `rate` messages a second to each other one, over UDP and TCP."""
    for guest in every:
        await asyncio.to_thread(made.run_guest, guest, homes[guest.name])
    async with conversing(made, every, rate) as controls:
        yield controls


@asynccontextmanager
async def conversing(
    made: World, every: Sequence[LabGuest], rate: int
) -> AsyncIterator[dict[str, GuestControl]]:
    """The same with guests that run already, for the block."""
    controls = {}
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


async def get_on(made: World, every: Sequence[LabGuest]) -> None:
    """Each hears more over the connections that it had: nothing was lost, nothing came twice."""
    for guest in every:
        control = await guest.control(made.lab)
        now = await control.talk()
        given_up_s = asyncio.get_running_loop().time() + PATIENCE_S
        while (later := await control.talk()).tcp_heard < now.tcp_heard + 100:
            assert asyncio.get_running_loop().time() < given_up_s, later
            await asyncio.sleep(0.1)
        assert later.wrong == 0
        await control.close()


class Witness:
    """Finds what each guest had said and heard in checkpoints that were taken together."""

    def __init__(self, made: World, homes: Mapping[str, str], every: Sequence[LabGuest]) -> None:
        self._made, self._homes, self._every = made, homes, every
        # A guest's page of counts stays where it is.
        self._pages: dict[str, int] = {}

    def violations(self, points: Mapping[str, str]) -> tuple[list[Violation], int]:
        """What is wrong with a cut (checkpoints' ids by VM), and what had been said in it."""
        counts = {guest.address: self._counts(guest, points[guest.name]) for guest in self._every}
        every = [one for of_one in counts.values() for one in of_one.values()]
        assert len(every) == len(counts) * (len(counts) - 1), counts
        assert not any(one.wrong for one in every), counts
        return violations(counts), sum(one.udp_sent + one.tcp_sent for one in every)

    def _counts(self, guest: LabGuest, point_id: str) -> Mapping[str, Counts]:
        location = own_location(self._made.state(self._homes[guest.name]))
        with open_store(location) as store, store.read(point_id) as point:
            area = point.area(RAM)
            if guest.name not in self._pages:
                [self._pages[guest.name]] = [
                    int(number)
                    for numbers, contents in area.stream()
                    for number in numbers[pages_at(contents)]
                ]
            page = area.read(np.array([self._pages[guest.name]])).tobytes()
            assert page.startswith(MAGIC)
            return parse_page(page)
