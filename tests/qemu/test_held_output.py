"""What a real guest sends while it is held: QEMU's own timers let nothing of it out."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from tests.qemu.world import World, image, qemu, world
from vmckpt.epoch import output
from vmckpt.epoch.output import HeldOutput
from vmckpt.lab.guests.guest import GuestControl
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.vm.inventory import read_vm

# What a filter-buffer takes (net/queue.c, nq_maxlen).
MOST_PACKETS = 10_000


@dataclass(frozen=True, slots=True)
class Sender:
    """A guest that beats a thousand times a second, and its QEMU's monitor."""

    made: World
    guest: LabGuest
    control: GuestControl
    monitor: Monitor

    async def heard(self, since_ns: int) -> tuple[int, int]:
        """How many of its beats have come since then, and how many are missing among them."""
        await asyncio.sleep(0.2)
        observer = str(self.made.lab.heartbeats)
        reader, writer = await asyncio.open_unix_connection(observer)
        writer.write(json.dumps({"id": self.guest.number, "since_ns": since_ns}).encode() + b"\n")
        found = json.loads(await reader.readline())
        writer.close()
        return found["received"], found.get("lost", 0)


@asynccontextmanager
async def sending(made: World) -> AsyncIterator[Sender]:
    guest = LabGuest("guest", 1, image(), memory="128M", disk=None)
    made.run_guest(guest, "lab-a")
    control = await guest.control(made.lab)
    vm = await read_vm(made.asked("lab-a"), "guest")
    assert vm is not None
    try:
        async with session(await vm.host.connect(vm.qemu.files.operator), "guest") as monitor:
            yield Sender(made, guest, control, monitor)
    finally:
        await control.close()


async def released(held: HeldOutput) -> None:
    """An epoch's end, and its acknowledgement."""
    for step in held.end_epoch():
        await step
    await held.release()


@pytest.mark.parametrize("version", ["10.0", "7.2"])
def test_no_timer_lets_anything_out(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after 71 minutes in which whoever holds the output, and its guard, were frozen."""

    async def main(made: World) -> None:
        async with sending(made) as sender:
            held = HeldOutput(sender.monitor, ["net0"])
            began_ns = time.monotonic_ns()
            assert (await sender.heard(began_ns))[0] > 0
            with monkeypatch.context() as patched:
                patched.setattr(output, "_INTERVAL_US", 100_000)
                await held.hold()
            began_ns = time.monotonic_ns() + 50_000_000
            await asyncio.sleep(1.5)
            assert (await sender.heard(began_ns))[0] == 0
            # What is safe leaves all the same, and in between nothing.
            asked = asyncio.ensure_future(sender.control.ping(timeout_s=30.0))
            while not asked.done():
                await released(held)
            asked.result()
            began_ns = time.monotonic_ns() + 50_000_000
            await asyncio.sleep(0.5)
            assert (await sender.heard(began_ns))[0] == 0
            # Frozen for too long this side lets nothing out that the timer may have moved.
            with monkeypatch.context() as patched:
                patched.setattr(output, "_TRUSTED_S", 0.1)
                for step in held.end_epoch():
                    await step
                await asyncio.sleep(0.3)
                await held.release()
            assert (await sender.heard(began_ns))[0] == 0
            await held.release_all()
            began_ns = time.monotonic_ns()
            assert (await sender.heard(began_ns))[0] > 0

    with world(qemu(version)) as made:
        asyncio.run(main(made))


def test_what_is_held_beyond_ten_thousand_packets_is_lost_and_is_seen_to_come() -> None:
    """Lost as on a network: TCP sends it again."""

    async def main(made: World) -> None:
        async with sending(made) as sender:
            held = HeldOutput(sender.monitor, ["net0"])
            (nic,) = await commands.query_virtio_nics(sender.monitor)
            await sender.control.beat("10.77.0.254:7700", hz=10_000)
            await held.hold()
            began_ns = time.monotonic_ns()
            began = at_most = await commands.query_sent_packets(sender.monitor, nic)
            while not await held.is_filling():
                at_most = await commands.query_sent_packets(sender.monitor, nic)
                await asyncio.sleep(0.02)
            assert MOST_PACKETS / 3 < (at_most - began) % commands.SENT_PACKETS_WRAP < MOST_PACKETS
            await released(held)
            assert not await held.is_filling()
            assert (await sender.heard(began_ns))[1] == 0
            asked = asyncio.ensure_future(sender.control.ping(timeout_s=60.0))
            began_ns, sent = time.monotonic_ns(), 0
            seen = await commands.query_sent_packets(sender.monitor, nic)
            while sent < 1.1 * MOST_PACKETS:
                await asyncio.sleep(0.05)
                now = await commands.query_sent_packets(sender.monitor, nic)
                sent, seen = sent + (now - seen) % commands.SENT_PACKETS_WRAP, now
            await held.release_all()
            await asked
            await sender.control.beat(None)
            received, lost = await sender.heard(began_ns)
            assert lost > 0.05 * MOST_PACKETS
            assert received > 0.9 * MOST_PACKETS

    with world(qemu("10.0")) as made:
        asyncio.run(main(made))
