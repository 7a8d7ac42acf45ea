"""A source's machine loses power in a migration: nothing closes its connection to the target."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from tests.qemu.world import World, eventually, image, loaded, qemu, read, send, world
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.network import set_link

# At this rate it takes half a minute.
SLOWLY = ["--bandwidth", "4MB"]


@pytest.fixture(params=["10.0 10.0", pytest.param("7.2 10.0", marks=pytest.mark.long)])
def made(request: pytest.FixtureRequest) -> Iterator[World]:
    first, second = request.param.split()
    with world(qemu(first), qemu(second)) as one:
        one.run_guest(guest(), "lab-a")
        yield one


def guest() -> LabGuest:
    return LabGuest("mover", 1, image(), machine="pc-q35-7.2")


def test_its_vm_can_be_started_from_its_disks(made: World) -> None:
    """The target's QEMU waited for good, and every command said that the outcome is unknown."""
    journal = made.state("lab-b") / "vms/mover/migration.json"

    async def play() -> tuple[int, str]:
        async with loaded(made, guest()) as control:
            await control.load_memory("rate=50M set=64M")
        source = made.qemus("mover")
        command = made.begin("migrate", "mover", "lab-b", *SLOWLY)
        await asyncio.to_thread(
            eventually, lambda: '"transfer"' in read(journal), 30, "its memory moves"
        )
        await asyncio.sleep(1.0)
        await set_link(made.lab, "lab-b", up=False)
        send(signal.SIGKILL, source)
        _, said = await asyncio.to_thread(command.communicate, timeout=120)
        await set_link(made.lab, "lab-b", up=True)
        return command.returncode, said

    code, said = asyncio.run(play())
    assert code == 10, said
    assert "cutting the connection that the target still waits on" in said
    shown = made.ok("vm", "show", "mover")
    assert (shown["host"], shown["state"]) == ("lab-a", "stopped")
    assert made.qemus("mover") == []
    assert made.files("lab-b") == []
    assert made.ok("vm", "start", "mover")["host"] == "lab-a"
