"""A virtio-net failover pair: it moves with traffic flowing, its primary unplugged and replugged.

An emulated vmxnet3 stands in for a host's NIC: the guest's net_failover takes it as one.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.device_guest import in_guest, place
from tests.qemu.world import World, image, loaded, qemu, world
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.qemu.hotplug import plugged
from vmckpt.qemu.monitor import session

pytestmark = pytest.mark.long

NAME, MAC = "paired", "52:54:00:00:00:42"
PAIR = f"""
[[passthrough]]
id = "vf0"
driver = "vmxnet3"
strategy = "failover"
nic = 0
options = {{ mac = "{MAC}" }}
"""


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world(qemu("10.0"), qemu("10.0")) as one:
        text = guest().spec().replace('network = "bridge"', f'network = "bridge"\nmac = "{MAC}"')
        spec = one.shared / f"{NAME}.toml"
        spec.write_text(text + PAIR)
        one.ok("vm", "run", str(spec), "--host", "lab-a")
        yield one


def guest() -> LabGuest:
    return LabGuest(NAME, 1, image())


@pytest.mark.timeout(300)
def test_it_moves_with_traffic_flowing(made: World) -> None:
    asyncio.run(there_and_back(made))


async def there_and_back(made: World) -> None:
    # What it is asked meanwhile, over one connection, is answered, and once: see `loaded`.
    async with loaded(made, guest()) as control:
        boot = (await control.stat()).boot
        for target in ("lab-b", "lab-a"):
            await asyncio.to_thread(primary_is_used, made)
            await asyncio.to_thread(made.ok, "migrate", NAME, target)
            shown = await asyncio.to_thread(made.ok, "vm", "show", NAME)
            assert (shown["host"], shown["state"]) == (target, "running")
        await asyncio.to_thread(primary_is_used, made)
        assert (await control.stat()).boot == boot


@pytest.mark.timeout(300)
def test_a_move_that_is_given_up_brings_the_primary_back(made: World) -> None:
    async def act() -> None:
        async with loaded(made, guest()):
            await asyncio.to_thread(primary_is_used, made)
            words = ("migrate", NAME, "lab-b", "--bandwidth", "2MB", "--timeout", "3s")
            done = await asyncio.to_thread(made.vmckpt, *words)
            assert done.code == 8, done.stderr
            await asyncio.to_thread(primary_is_used, made)

    asyncio.run(act())


def primary_is_used(made: World) -> None:
    """Return once QEMU has the primary plugged in and the guest has it in its pair."""
    deadline = time.monotonic() + 60
    while not (asyncio.run(is_plugged(made)) and "vmxnet3" in pair(made)):
        assert time.monotonic() < deadline, pair(made)
        time.sleep(0.2)


async def is_plugged(made: World) -> bool:
    host, path = place(made, NAME)
    sock = await made.asked(host).connect(Path(path) / "watch.sock")
    async with session(sock, NAME) as monitor:
        return "vf0" in await plugged(monitor)


def pair(made: World) -> str:
    """The drivers of the guest's NICs that belong to a pair."""
    script = "for n in /sys/class/net/*; do [ -e $n/master ] && readlink $n/device/driver; done"
    return in_guest(made, "sh", "-c", script, name=NAME).out.decode()
