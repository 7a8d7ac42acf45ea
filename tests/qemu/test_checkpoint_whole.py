"""VMs that have their memory alone: adopted ones, forks. Taken in passing, or saved as a whole."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.jobs import at_work
from tests.qemu.test_adopt import BLOCKDEV, CANNOT, HAND, adopt, by_hand
from tests.qemu.test_checkpoint import all_there, console, guest, load, sound
from tests.qemu.world import World, qemu, world
from tests.waiting import eventually
from vmckpt.hosts.processes.process import is_alive
from vmckpt.lab.guests.guest import GuestControl
from vmckpt.qemu.agent import GuestAgent
from vmckpt.vm.argv import default_mac


async def _loaded(made: World) -> None:
    control = await guest().control(made.lab)
    await load(control)
    await control.close()


def saving(made: World, name: str) -> bool:
    return (made.state("lab-a") / "vms" / name / "saving").exists()


async def macs(made: World, name: str) -> list[str]:
    """What the guest's interfaces have, as its agent says."""
    (agent,) = made.state("lab-a").glob(f"vms/{name}/qemu-*/agent.sock")
    session = await GuestAgent.connect(await made.asked("lab-a").connect(agent))
    found = await session.interfaces()
    await session.close()
    return [one.mac for one in found]


@pytest.mark.timeout(300)
def test_a_fork_is_saved_and_becomes_another_vm() -> None:
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        asyncio.run(_loaded(made))
        (fork,) = made.ok("fork", "guest", "--count", "1", "--name", "f")["forks"]
        assert (fork["error"], fork["warnings"]) == ("", [])
        too_long = made.vmckpt(
            "checkpoint", "create", "f-1", "--kind", "file", "--max-pause", "1ms"
        )
        assert too_long.code == 4
        assert "too long" in too_long.error["what"]
        first = made.ok("checkpoint", "create", "f-1", "--kind", "file", "--name", "whole")
        assert (first["kind"], first["saved_as"]) == ("file", "mapped-ram")
        again = made.ok("checkpoint", "create", "f-1", "--kind", "file", "--name", "again")
        assert again["parent"] == first["id"]
        # Pages stand where they would in memory: the store knows those that the load left alone.
        areas = made.ok("checkpoint", "show", "again")["areas"]
        (saved,) = [area for area in areas if area["name"] == "saved"]
        print(saved)
        assert saved["new_chunks"] < 0.8 * saved["chunks"]
        assert made.ok("checkpoint", "verify", "again")["whole"]
        restored = made.ok("checkpoint", "restore", "whole", "--as", "copy")
        # Its agent has told it what time it is, and who.
        assert restored["warnings"] == []
        assert default_mac("copy", 0) in asyncio.run(macs(made, "copy"))
        ticks = console(made, "copy").count("VK tick=")
        eventually(lambda: console(made, "copy").count("VK tick=") > ticks + 1, 60, "it ticks")
        last = [line for line in console(made, "copy").splitlines() if "VK tick=" in line][-1]
        assert "mem_errors=0 disk_errors=0" in last
        refused = made.vmckpt("fork", "whole", "--name", "g")
        assert (refused.code, "saved as a whole" in refused.error["why"]) == (4, True)
        # What came of it is a VM like any.
        made.ok("checkpoint", "create", "copy", "--name", "of-the-copy")
        made.ok("checkpoint", "prune", "f-1", "--keep-last", "1", "--apply")
        listed = made.ok("checkpoint", "list", "f-1")["checkpoints"]
        assert [one["id"] for one in listed] == [again["id"]]


@pytest.mark.timeout(300)
def test_a_fork_is_taken_as_it_runs_and_goes_back() -> None:
    """Also what it has not touched, which only the file below its memory holds."""
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        asyncio.run(_loaded(made))
        made.ok("fork", "guest", "--count", "1", "--name", "f")
        taken = made.ok("checkpoint", "create", "f-1", "--name", "of-a-fork")
        assert taken["kind"] == "epoch"
        restored = made.ok("checkpoint", "restore", "of-a-fork", "--as", "copy")
        assert restored["warnings"] == []
        ticks = console(made, "copy").count("VK tick=")
        eventually(lambda: console(made, "copy").count("VK tick=") > ticks + 1, 60, "it ticks")
        for name in ("f-1", "copy"):
            last = [line for line in console(made, name).splitlines() if "VK tick=" in line][-1]
            assert "mem_errors=0 disk_errors=0" in last
            asyncio.run(all_there(made, name))


@pytest.mark.timeout(300)
def test_an_adopted_vm_is_taken_as_it_runs_and_goes_back() -> None:
    with world(qemu("10.0")) as made, by_hand(made, BLOCKDEV, monitors=3) as process:
        adopt(made)
        assert made.ok("vm", "show", "hand")["cannot"] == CANNOT
        asyncio.run(_by_hand_loaded(made))
        taken = made.ok("checkpoint", "create", "hand", "--name", "running")
        assert taken["kind"] == "epoch"
        again = made.ok("checkpoint", "create", "hand", "--name", "again")
        assert again["stored"] < taken["stored"]
        asyncio.run(_by_hand_sound(made))
        assert is_alive(process)
        made.ok("checkpoint", "restore", "running", "--in-place")
        assert not is_alive(process)
        asyncio.run(_by_hand_sound(made))
        assert made.ok("vm", "show", "hand")["cannot"] == CANNOT


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["7.2", pytest.param("10.0", marks=pytest.mark.long)])
def test_an_adopted_vm_goes_back(version: str) -> None:
    with world(qemu(version)) as made, by_hand(made, BLOCKDEV, monitors=2):
        adopt(made)
        asyncio.run(_by_hand_loaded(made))
        refused = made.vmckpt("checkpoint", "create", "hand")
        code = "memory-file" if version == "7.2" else "guard"
        assert (refused.code, f"[{code}]" in refused.error["why"]) == (4, True)
        taken = made.ok("checkpoint", "create", "hand", "--kind", "file", "--name", "whole")
        assert taken["saved_as"] == ("stream" if version == "7.2" else "mapped-ram")
        asyncio.run(_by_hand_sound(made))
        made.ok("checkpoint", "restore", "whole", "--in-place")
        asyncio.run(_by_hand_sound(made))


async def _by_hand_loaded(made: World) -> None:
    control: GuestControl = await HAND.control(made.lab)
    await load(control)
    await control.close()


async def _by_hand_sound(made: World) -> None:
    control = await HAND.control(made.lab)
    memory, disk = await control.verify_memory(), await control.verify_disk()
    assert memory.sound, memory
    assert disk.sound, disk
    await control.close()


@pytest.mark.timeout(300)
def test_whoever_saves_it_may_be_killed_and_a_full_disk_touches_nothing() -> None:
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        asyncio.run(_loaded(made))
        for with_the_switch in (False, True):
            command = made.begin("checkpoint", "create", "guest", "--kind", "file")
            eventually(lambda: saving(made, "guest"), 60, "it began")
            _kill_services(made, with_recovery=with_the_switch)
            command.communicate()
            # Without the switch the next command on the VM lets it run.
            shown = made.vmckpt("vm", "show", "guest")
            assert shown.code in (0, 5), shown
            eventually(lambda: not saving(made, "guest"), 60, "it was given up")
            asyncio.run(sound(made))
        made.ok("checkpoint", "create", "guest", "--kind", "file", "--name", "after")
        made.ok("checkpoint", "restore", "after", "--in-place")
        asyncio.run(sound(made))
        asyncio.run(all_there(made, "guest"))


@pytest.mark.timeout(300)
def test_nothing_is_touched_if_it_would_not_fit() -> None:
    with world(qemu("10.0")) as made:
        (made.state("lab-a") / "vms").mkdir(exist_ok=True)
        with made.small("lab-a", "vms", 24 << 20):
            made.run_guest(guest(), "lab-a")
            asyncio.run(_loaded(made))
            refused = made.vmckpt("checkpoint", "create", "guest", "--kind", "file")
            assert (refused.code, "no room" in refused.error["what"]) == (4, True)
            asyncio.run(sound(made))
            made.ok("vm", "stop", "guest", "--force")
            made.ok("vm", "rm", "guest")


def _kill_services(made: World, *, with_recovery: bool) -> None:
    for process in at_work(made.state_dir):
        with suppress(OSError):  # it has ended
            words = Path(f"/proc/{process.pid}/cmdline").read_text()
            if with_recovery or "--recover" not in words:
                os.kill(process.pid, signal.SIGKILL)
