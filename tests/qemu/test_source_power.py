"""A source's machine loses power in a migration: nothing closes its connection to the target."""

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest

from tests.qemu.world import World, image, qemu, read, send, world
from tests.waiting import eventually
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.network import set_link

# At this rate it takes half a minute.
SLOWLY = ["--bandwidth", "1MB"]


@pytest.fixture(params=["10.0 10.0", pytest.param("7.2 10.0", marks=pytest.mark.long)])
def made(request: pytest.FixtureRequest) -> Iterator[World]:
    first, second = request.param.split()
    with world(qemu(first), qemu(second)) as one:
        one.run_guest(guest(), "lab-a")
        yield one


def guest() -> LabGuest:
    return LabGuest("mover", 1, image(), machine="pc-q35-7.2")


# Beside other tests 30 s of waiting and two starts of a guest take their time.
@pytest.mark.timeout(300)
def test_its_vm_can_be_started_from_its_disks(made: World) -> None:
    """The target's QEMU waited for good, and every command said that the outcome is unknown."""
    journal = made.state("lab-b") / "vms/mover/migration.json"

    source = made.qemus("mover")
    command = made.begin("migrate", "mover", "lab-b", *SLOWLY)
    eventually(lambda: '"transfer"' in read(journal), 30, "its memory moves")
    time.sleep(2.0)
    asyncio.run(set_link(made.lab, "lab-b", up=False))
    send(signal.SIGKILL, source)
    _, said = command.communicate(timeout=200)
    asyncio.run(set_link(made.lab, "lab-b", up=True))
    code = command.returncode
    assert code == 10, said
    assert "closing the connection on which the destination still waits" in said
    shown = made.ok("vm", "show", "mover")
    assert (shown["host"], shown["state"]) == ("lab-a", "stopped")
    assert made.qemus("mover") == []
    assert made.files("lab-b") == []
    assert made.ok("vm", "start", "mover")["host"] == "lab-a"
