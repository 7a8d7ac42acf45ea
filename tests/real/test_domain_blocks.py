"""Domains whose memory is in several blocks: two NUMA nodes and a memory module."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.qemu.world import image
from tests.real.domains import GUEST, VIRT_INSTALL, DomainMemory, qemus, states
from tests.real.machines import Machines
from tests.real.test_domain_checkpoints import (
    COPY,
    booted,
    domain,
    nothing_left,
    sound,
    take,
)
from tests.real.test_domain_forks import FORKS, qemu_of, shared_ram
from tests.real.test_domain_groups import OTHERS
from tests.real.test_domain_guard import KEPT, ROLLED_BACK, guard, only_it, points
from tests.real.test_domain_memory import BEFORE, caught, pagers, restore
from tests.waiting import eventually
from vmckpt.hosts.processes.process import kill
from vmckpt.memory.dirty_pages import Mapping, present
from vmckpt.memory.ram_file import open_fd
from vmckpt.units import MIB
from vmckpt.vm.domains.process import find_ram

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(400)]
NODE_MIB, MODULE_MIB = 128, 128
BLOCKS = (NODE_MIB * MIB, NODE_MIB * MIB, MODULE_MIB * MIB)
SIZES = (
    "<maxMemory slots='4' unit='MiB'>1024</maxMemory>"
    f"<memory unit='MiB'>{2 * NODE_MIB + MODULE_MIB}</memory>"
)
NODES = (
    f"<numa><cell id='0' cpus='0' memory='{NODE_MIB}' unit='MiB'{{more}}/>"
    f"<cell id='1' memory='{NODE_MIB}' unit='MiB'{{more}}/></numa>"
)
MODULE = (
    f"<memory model='dimm'><target><size unit='MiB'>{MODULE_MIB}</size><node>1</node></target>"
    "</memory>"
)

LONG = pytest.mark.long


@pytest.fixture(scope="module")
def several(secured: Machines) -> Iterator[Machines]:
    """A domain whose guest uses all of its blocks, for tests that leave it as it was."""
    for made in in_blocks(secured):
        asyncio.run(loaded(made))
        assert all(mib > 16 for mib in used(made)), used(made)
        take(made, "one")
        yield made


def in_blocks(made: Machines, backing: str = "", more: str = "") -> Iterator[Machines]:
    """`backing`: XML of what its memory is in; `more`: of each of its nodes."""
    memory = DomainMemory(SIZES + backing, NODES.format(more=more), " memhp_default_state=online")
    try:
        yield from domain(made, VIRT_INSTALL + MODULE, memory=memory)
    finally:
        words = ("virsh", "--connect", "qemu:///system")
        for name in FORKS:
            for action in ("destroy", "undefine"):
                made.inside("lab-a", *words, action, name)


async def loaded(made: Machines) -> None:
    await booted(made)
    control = await GUEST.control(made.lab)
    await control.load_memory("rate=20M set=200M pattern=uniform content=random")
    await control.load_disk("rate=2M size=16M")
    await control.close()


def used(made: Machines) -> list[int]:
    """How much of each block there is in its QEMU, in MiB."""
    (qemu,) = qemus(made, "lab-a")
    found = list[int]()
    with open_fd(os.open(f"/proc/{qemu.pid}/pagemap", os.O_RDONLY)) as pagemap:
        for start, end in find_ram(qemu.pid, BLOCKS).private:
            spans = present(pagemap, Mapping(start, end, 0))
            found.append(sum(b - a for a, b in spans) // MIB)
    return found


def is_as_before(made: Machines) -> None:
    asyncio.run(sound(made))
    nothing_left(made)


def removed(made: Machines, *names: str) -> None:
    for name in names:
        made.ok("vm", "stop", name, "--force")
        made.ok("vm", "rm", name, "--disks")


def test_it_is_the_same_guest_again(several: Machines) -> None:
    made = several
    rate = made.ok("dirty-rate", GUEST.name, "--for", "1s")
    assert (rate["source"], rate["ram_bytes"]) == ("page-tracking", sum(BLOCKS))
    done = restore(made)
    assert done.code == 0, done.stderr
    assert not [one for one in done.result["warnings"] if BEFORE in one]
    is_as_before(made)


@LONG
def test_its_forks_share_all_blocks(several: Machines) -> None:
    made = several
    words = ("--count", "2", "--name", "copy", "--network-plugged")
    forks = made.ok("fork", GUEST.name, *words)["forks"]
    assert [one["error"] for one in forks] == ["", ""]
    assert not [text for one in forks for text in one["warnings"] if "loaded before" in text]
    for name in FORKS:
        fork = qemu_of(made, name)
        assert shared_ram(fork)[0] > 16 * MIB
        maps = Path(f"/proc/{fork.pid}/maps").read_text().splitlines()
        assert sum("vmckpt-fork-" in line for line in maps) == len(BLOCKS)
    # They have the original's address: one of the three is asked at a time.
    for name in (GUEST.name, *FORKS):
        made.virsh("lab-a", "suspend", name)
    for name in (*FORKS, GUEST.name):
        made.virsh("lab-a", "resume", name)
        asyncio.run(sound(made))
        made.virsh("lab-a", "suspend", name)
    made.virsh("lab-a", "resume", GUEST.name)
    removed(made, *FORKS)
    is_as_before(made)


@LONG
def test_all_of_it_is_loaded_before_if_asked_for_and_a_copy_runs_beside_it(
    several: Machines,
) -> None:
    made = several
    eager = restore(made, "--eager")
    assert eager.code == 0, eager.stderr
    is_as_before(made)
    made.ok("checkpoint", "restore", "one", "--as", COPY)
    free = lambda: made.ok("vm", "show", COPY)["operation"] is None  # noqa: E731
    eventually(free, 60, "all memory to be loaded")
    assert made.virsh("lab-a", "domstate", COPY).strip() == "running"
    removed(made, COPY)
    is_as_before(made)


@LONG
def test_a_pager_that_is_killed_is_followed_by_another(several: Machines) -> None:
    made = several
    command = made.begin("checkpoint", "restore", "one", "--in-place", "--yes")
    for pager in caught(made, "pages/missing.json"):
        kill(pager)
    _, stderr = command.communicate(timeout=120)
    assert command.returncode == 0 or "could not be read" in stderr, stderr
    is_as_before(made)
    assert pagers(made) == []


@LONG
def test_it_is_restored_on_another_host_and_by_plain_virsh(several: Machines) -> None:
    made = several
    store = f"lab-a:{made.shared}/blocks"
    made.ok("store", "init", store)
    made.ok("checkpoint", "create", GUEST.name, "--name", "point", "--store", store)
    removed(made, GUEST.name)
    there = ("--store", store, "--host", "lab-b")
    made.ok("checkpoint", "restore", "point", *there)
    asyncio.run(sound(made))
    assert states(made) == {"lab-b": "running"}
    removed(made, GUEST.name)
    directory = made.shared / "exported"
    done = made.ok("checkpoint", "export", "point", str(directory), "--store", store)
    made.virsh("lab-a", "restore", done["image"])
    asyncio.run(sound(made))
    made.virsh("lab-a", "destroy", GUEST.name)
    subprocess.run(["rm", "-r", str(directory)], check=True)
    made.ok("checkpoint", "restore", "one")
    is_as_before(made)


@LONG
def test_guard_schedule_and_group(several: Machines) -> None:
    made = several
    try:
        assert guard(made, "--for", "1s", "--", "true").code == KEPT
        only_it(made)
        assert guard(made, "--for", "1s", "--", "false").code == ROLLED_BACK
        only_it(made)
    finally:
        for point in points(made):
            made.vmckpt("checkpoint", "unpin", point, "--force")
    before = len(points(made))
    made.ok("schedule", "add", GUEST.name, "--every", "1h", "--keep-last", "2")
    made.ok("schedule", "run-due")
    made.ok("schedule", "rm", GUEST.name)
    assert len(points(made)) <= before + 1
    nothing_left(made)
    mate = replace(OTHERS[0], image=image())
    made.run_guest(mate, "lab-b")
    try:
        words = ("--group", f"{GUEST.name},{mate.name}", "--name", "cut", "--max-hold", "3s")
        made.ok("checkpoint", "create", *words)
        made.ok("checkpoint", "restore", "--group", "cut", "--in-place", "--yes")
        is_as_before(made)
    finally:
        made.vmckpt("vm", "stop", mate.name, "--force")
        made.vmckpt("vm", "rm", mate.name)


@LONG
def test_plans_for_it_are_of_what_it_does(several: Machines) -> None:
    made = several
    measuring = made.begin("host", "calibrate", "lab-a", "lab-b", "--size", "128M")
    _, said = measuring.communicate(timeout=300)
    assert measuring.returncode == 0, said
    for host in ("lab-b", "lab-a"):  # to know how long a disk takes
        moved = made.ok("migrate", GUEST.name, host)
        assert moved["method"] == "stop"  # under TCG QEMU sees writes to the first block alone
    planned = made.ok("plan", GUEST.name, "lab-b", "--for", "2s")
    assert planned["dirty_rate"]["source"] == "page-tracking"
    assert planned["dirty_rate"]["ram_bytes"] == sum(BLOCKS)
    assert planned["way"], planned
