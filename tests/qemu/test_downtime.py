"""Guest-visible downtime of a guest that sends no heartbeats, by ARP probes from its source."""

import asyncio
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.world import World, image, qemu, world
from tests.waiting import eventually
from vmckpt.hosts.processes.process import find_by_argument
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.vm.argv import default_mac

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(180)]
GUEST = LabGuest("quiet", 9, Path())


@pytest.fixture
def made() -> Iterator[World]:
    with world(qemu("10.0"), qemu("10.0")) as one:
        guest = LabGuest(GUEST.name, GUEST.number, image())
        text = re.sub(r"^(heartbeat_id|guest_agent).*$", "", guest.spec(), flags=re.MULTILINE)
        spec = one.shared / "quiet.toml"
        spec.write_text(text)
        one.ok("vm", "run", str(spec), "--host", "lab-a")
        yield one


async def booted(made: World) -> None:
    control = await GUEST.control(made.lab)
    await control.close()


def known(made: World, host: str) -> None:
    """The host knows the guest's address, as after any traffic between the two."""
    enter = [*made.lab.host(host).enter]
    mac = default_mac(GUEST.name, 0)
    add = ["ip", "neigh", "replace", GUEST.address, "lladdr", mac, "dev", "br0"]
    subprocess.run([*enter, *add], check=True)


def probes(made: World) -> list[str]:
    return [path.name for path in made.state_dir.rglob("echo-*")]


def log(made: World, host: str) -> Path:
    """What its QEMU there says."""
    [found] = (made.state(host) / "vms" / GUEST.name).glob("qemu-*/stderr.log")
    return found


def changes_s(text: str, running: str) -> list[float]:
    """When a QEMU's guest was paused ("0") or ran on ("1"), Unix time."""
    return [float(at) for at in re.findall(rf"@(\d+\.\d+):vm_state_notify running {running}", text)]


def test_it_is_probed_and_the_report_says_so(made: World) -> None:
    unknown = made.ok("migrate", GUEST.name, "lab-b")
    assert (unknown["guest_downtime_ms"], unknown["guest_downtime_by"]) == (None, None)
    known(made, "lab-b")
    asyncio.run(booted(made))
    with log(made, "lab-b").open() as source:  # which goes with its QEMU
        moved = made.ok("migrate", GUEST.name, "lab-a")
        stopped_s = changes_s(source.read(), "0")[-1]
    assert moved["guest_downtime_by"] == "arp", moved
    # It could not answer between the two moments.
    paused_ms = (changes_s(log(made, "lab-a").read_text(), "1")[-1] - stopped_s) * 1e3
    assert moved["guest_downtime_ms"] >= paused_ms - moved["guest_downtime_too_short_ms"], moved
    assert 0 < moved["guest_downtime_too_short_ms"] < moved["guest_downtime_ms"], moved
    assert moved["guest_downtime_ms"] < 1000 * moved["total_time_s"], moved
    assert moved["heartbeats_lost"] is None
    assert probes(made) == []


def test_a_killed_migration_leaves_no_probe(made: World) -> None:
    known(made, "lab-a")
    command = made.begin("migrate", GUEST.name, "lab-b", "--bandwidth", "4MiB/s")
    running = f"echo\0br0\0{default_mac(GUEST.name, 0)}"
    eventually(lambda: find_by_argument(running) or command.poll() is not None, 60, "the probe")
    made.kill(command)
    made.ok("vm", "show", GUEST.name)
    eventually(lambda: probes(made) == [], 30, "the probe to end by itself")
