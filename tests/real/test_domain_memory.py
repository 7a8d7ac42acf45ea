"""Memory of a restored domain that is loaded while its guest runs: whoever dies, it is right."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.world import Done
from tests.real.domains import GUEST, VIRT_INSTALL, states
from tests.real.machines import Machines
from tests.real.test_domain_checkpoints import (
    COPY,
    booted,
    domain,
    files,
    load,
    nothing_left,
    sound,
    take,
)
from tests.waiting import eventually
from vmckpt.hosts.processes.process import ProcessId, kill

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(600)]
PAGER = "\0vmckpt.checkpoint.restore.pager\0"
BEFORE = "all memory was loaded before the guest ran"


@pytest.fixture
def taken(secured: Machines) -> Iterator[Machines]:
    """A domain under load that has a checkpoint, `one`."""
    for made in domain(secured, VIRT_INSTALL):
        asyncio.run(_loaded(made))
        take(made, "one")
        yield made


async def _loaded(made: Machines) -> None:
    await booted(made)
    await (await load(made)).close()


def restore(made: Machines, *words: str) -> Done:
    return made.vmckpt("checkpoint", "restore", "one", "--in-place", "--yes", *words)


def pagers(made: Machines) -> list[ProcessId]:
    return made.processes(PAGER)


def caught(made: Machines, name: str) -> list[ProcessId]:
    """The pagers of a domain that is restored, stopped once the domain has a file of that name."""
    seen = list[ProcessId]()
    there = f"test -e /var/lib/vmckpt/libvirt/*/{name}"
    eventually(lambda: made.inside("lab-a", "sh", "-c", there).code == 0, 60, name)

    def stopped() -> bool:
        for pager in pagers(made):
            os.kill(pager.pid, signal.SIGSTOP)
            seen.append(pager)
        return bool(seen)

    eventually(stopped, 60, "a pager")
    return seen


def test_its_guest_runs_before_its_memory_is_there(taken: Machines) -> None:
    made = taken
    done = restore(made)
    assert done.code == 0, done.stderr
    assert not [one for one in done.result["warnings"] if BEFORE in one]
    asyncio.run(sound(made))
    nothing_left(made)
    assert made.virsh("lab-a", "dumpxml", GUEST.name).count("qemu:commandline") == 0
    take(made, "two")
    # Loaded before, it is the same guest.
    eager = restore(made, "--eager")
    assert eager.code == 0, eager.stderr
    asyncio.run(sound(made))
    nothing_left(made)


def test_a_pager_that_is_killed_is_followed_by_another(taken: Machines) -> None:
    made = taken
    command = made.begin("checkpoint", "restore", "one", "--in-place", "--yes")
    eventually(lambda: states(made) == {"lab-a": "running"} and pagers(made), 60, "a pager")
    for pager in pagers(made):
        kill(pager)
    _, stderr = command.communicate(timeout=120)
    if command.returncode:  # killed before its guest ran: the old one continues
        assert "could not be read" in stderr or "did not start" in stderr, stderr
    asyncio.run(sound(made))
    nothing_left(made)


@pytest.mark.parametrize("name", ["pages", "pages/missing.json"])
def test_one_whose_restore_and_pager_are_killed_loses_nothing(taken: Machines, name: str) -> None:
    """Before libvirt has what it reads, and when its guest waits for pages."""
    made = taken
    command = made.begin("checkpoint", "restore", "one", "--in-place", "--yes")
    stopped = caught(made, name)
    for process in [*made.jobs(), *stopped]:
        kill(process)
    _, stderr = command.communicate(timeout=200)
    assert "Traceback" not in stderr
    eventually(lambda: files(made) <= {"identity", "checkpoint"}, 150, "its recovery")
    asyncio.run(sound(made))
    nothing_left(made)


def test_any_command_on_it_goes_on_with_what_nothing_else_is_left_to(taken: Machines) -> None:
    """The restore, its pager and what would have recovered both are dead: its guest waits."""
    made = taken
    command = made.begin("checkpoint", "restore", "one", "--in-place", "--yes")
    stopped = caught(made, "pages/missing.json")
    recoveries = made.processes("\0job\0restore\0")
    for process in recoveries:  # so that none sees another end
        os.kill(process.pid, signal.SIGSTOP)
    for process in [*recoveries, *stopped]:
        kill(process)
    command.communicate(timeout=200)
    assert "restore.json" in files(made)
    made.ok("vm", "show", GUEST.name)
    asyncio.run(sound(made))
    nothing_left(made)


@pytest.mark.long
def test_a_restore_that_is_killed_at_any_moment_leaves_one_guest(taken: Machines) -> None:
    made, rng = taken, random.Random(30)
    for number in range(4):
        command = made.begin("checkpoint", "restore", "one", "--in-place", "--yes")
        eventually(made.jobs, 60, "its job")
        time.sleep(wait_s := rng.uniform(0.2, 4.0))
        for process in made.jobs():
            kill(process)
        _, stderr = command.communicate(timeout=200)
        assert "Traceback" not in stderr, (number, wait_s, stderr)
        eventually(lambda: files(made) <= {"identity", "checkpoint"}, 150, f"recovery {wait_s}")
        asyncio.run(sound(made))
        nothing_left(made)


def test_a_copy_from_an_encrypted_store_leaves_no_secret(taken: Machines, tmp_path: Path) -> None:
    made, key = taken, tmp_path / "key"
    place = ("--store", f"lab-a:{made.shared}/sealed", "--key-file", str(key))
    made.ok("store", "init", *place[1:])
    made.ok("checkpoint", "create", GUEST.name, "--name", "sealed", *place)
    made.ok("checkpoint", "restore", "sealed", "--as", COPY, *place)
    eventually(lambda: not pagers(made), 60, "all memory to be loaded")
    kept = "ls /dev/shm/ | grep vmckpt; ls /var/lib/vmckpt/libvirt/*"
    eventually(
        lambda: "pages" not in made.inside("lab-a", "sh", "-c", kept).stdout,
        30,
        lambda: made.inside("lab-a", "sh", "-c", kept).stdout,
    )
    assert made.virsh("lab-a", "domstate", COPY).split() == ["running"]


def test_memory_that_is_in_a_file_is_loaded_before(secured: Machines) -> None:
    """Another process may map it, too: its pages cannot come when QEMU needs them."""
    made = secured
    xml = "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>"
    for _ in domain(made, VIRT_INSTALL):
        definition = made.virsh("lab-a", "dumpxml", GUEST.name, "--inactive")
        made.virsh("lab-a", "destroy", GUEST.name)
        path = made.shared / "dom-file.xml"
        path.write_text(definition.replace("<vcpu", f"{xml}<vcpu", 1))
        made.virsh("lab-a", "define", str(path))
        made.virsh("lab-a", "start", GUEST.name)
        asyncio.run(_loaded(made))
        take(made, "one")
        done = restore(made)
        assert done.code == 0, done.stderr
        assert [one for one in done.result["warnings"] if BEFORE in one]
        asyncio.run(sound(made))
        nothing_left(made)


def test_when_its_guest_runs_pages_are_still_missing(taken: Machines) -> None:
    """How soon that is does not depend on its memory."""
    made = taken
    with made.begin("checkpoint", "restore", "one", "--in-place", "--yes") as command:
        stopped = caught(made, "pages/missing.json")
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: states(made) == {"lab-a": "running"}, 60, "its guest to run")
        still = made.inside("lab-a", "sh", "-c", "ls /var/lib/vmckpt/libvirt/*/pages").stdout
        out, stderr = command.communicate(timeout=120)
    assert command.returncode == 0, (out, stderr)
    assert "missing.json" in still
    asyncio.run(sound(made))
    nothing_left(made)
