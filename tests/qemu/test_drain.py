"""A host is emptied and filled again, its guests at work; killed half-way the same goes on."""

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.qemu.world import World, image, qemu, read, world
from tests.waiting import eventually
from vmckpt.lab.guests.labguest import LabGuest

# Slow enough for several to be under way when it is killed.
SLOWLY = ("--bandwidth", "20MB", "--for", "500ms", "--max-parallel", "2")


def guests(count: int) -> list[LabGuest]:
    return [LabGuest(f"g{n}", n, image(), memory="128M", disk=None) for n in range(1, count + 1)]


async def load(made: World, guest: LabGuest) -> None:
    control = await guest.control(made.lab)
    await control.load_memory("rate=2M set=16M pattern=uniform content=random")
    await control.close()


async def sound(made: World, guest: LabGuest) -> None:
    control = await guest.control(made.lab)
    memory = await control.verify_memory()
    await control.close()
    assert memory.sound, memory


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world(*[qemu("10.0")] * 3) as one:
        for guest in guests(3):
            one.run_guest(guest, "lab-a")
            asyncio.run(load(one, guest))
        yield one


def homes(made: World) -> dict[str, str]:
    """Where each VM is; each runs, and in one place."""
    found = made.ok("vm", "list")["vms"]
    assert {vm["state"] for vm in found} == {"running"}, found
    for vm in found:
        assert len(made.qemus(vm["name"])) == 1, vm
    return {vm["name"]: vm["host"] for vm in found}


def record(made: World) -> dict[str, Any]:
    text = read(made.state_dir / "drains" / "lab-a.json")
    found: dict[str, Any] = json.loads(text) if text else {"away": {}, "moving": {}}
    return found


def test_killed_half_way_the_same_command_goes_on_and_all_come_back(made: World) -> None:
    command = made.begin("drain", "lab-a", *SLOWLY)
    eventually(lambda: record(made)["away"] or command.poll() is not None, 60, "one has moved")
    eventually(lambda: record(made)["moving"] or command.poll() is not None, 60, "others move")
    command.send_signal(signal.SIGKILL)
    command.communicate(timeout=10)
    assert record(made)["moving"], "it was over before it was killed"

    # A VM of its own: whether the guard of a VM that was under way is still at work is left open.
    spec = made.shared / "g4.toml"
    spec.write_text(guests(4)[3].spec())
    refused = made.vmckpt("vm", "run", str(spec), "--host", "lab-a")
    assert refused.code == 4
    assert "vmckpt undrain lab-a" in refused.error["remedy"]

    done = made.ok("drain", "lab-a", *SLOWLY)
    assert done["stay"] == []
    away = homes(made)
    assert set(away.values()) == {"lab-b", "lab-c"}
    assert record(made)["away"] == away
    assert not list((made.state("lab-a") / "vms").glob("*"))

    back = made.ok("undrain", "lab-a", "--for", "500ms")
    assert {one["vm"] for one in back["moved"]} == set(away)
    assert set(homes(made).values()) == {"lab-a"}
    for guest in guests(3):
        asyncio.run(sound(made, guest))
    # Turns on links, locks, marks: nothing of it stays.
    assert not [path for host in "abc" for path in made.state(f"lab-{host}").glob("links/*/*")]
    assert not (made.state("lab-a") / "drained.json").exists()


def test_ctrl_c_goes_back_with_what_is_under_way(made: World) -> None:
    command = made.begin("drain", "lab-a", *SLOWLY)
    eventually(lambda: record(made)["moving"] or command.poll() is not None, 60, "one moves")
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 130, err
    assert "VMs moved" in json.loads(out)["error"]["what"]
    assert set(homes(made)) == {"g1", "g2", "g3"}
    assert record(made)["moving"] == {}
    made.ok("undrain", "lab-a", "--for", "500ms")
    assert set(homes(made).values()) == {"lab-a"}
