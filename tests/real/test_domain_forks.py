"""Forks of libvirt's domains: they share memory and disks, and each is a domain of its own."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.domains import GUEST, OWN_DISK, VIRT_INSTALL, states
from tests.real.machines import Machines
from tests.real.test_domain_checkpoints import booted, domain, load, nothing_left, sound, take
from tests.waiting import eventually
from vmckpt.hosts.processes.process import ProcessId, kill

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(600)]
FORKS = ("copy-1", "copy-2")
MIB = 1 << 20


@pytest.fixture
def taken(secured: Machines) -> Iterator[Machines]:
    """A domain under load that has a checkpoint, `one`."""
    for made in domain(secured, VIRT_INSTALL):
        try:
            asyncio.run(_loaded(made))
            take(made, "one")
            yield made
        finally:
            for name in FORKS:
                for word in ("destroy", "undefine"):
                    made.inside("lab-a", "virsh", "--connect", "qemu:///system", word, name)


async def _loaded(made: Machines) -> None:
    await booted(made)
    await (await load(made)).close()


def qemu_of(made: Machines, name: str) -> ProcessId:
    (found,) = made.processes(f"-name\0guest={name},")
    return found


def shared_ram(process: ProcessId) -> tuple[int, int]:
    """Bytes of the guest's RAM that the process shares with others, and that it has alone."""
    shared = alone = 0
    is_ram = False
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        word, *rest = line.split()
        if "-" in word and not word.endswith(":"):
            is_ram = "vmckpt-fork-" in line
        elif is_ram and word.startswith("Shared_"):
            shared += int(rest[0]) << 10
        elif is_ram and word == "Private_Dirty:":
            alone += int(rest[0]) << 10
    return shared, alone


def images(made: Machines) -> set[str]:
    return set(made.inside("lab-a", "ls", str(OWN_DISK.parent)).stdout.split())


def nothing_of_forks_left(made: Machines) -> None:
    found = made.inside("lab-a", "sh", "-c", "ls -d /dev/shm/vmckpt-fork-*").stdout
    assert found == ""
    assert images(made) == {OWN_DISK.name}
    listed = made.virsh("lab-a", "list", "--all", "--name").split()
    assert listed == [GUEST.name]


def test_they_share_memory_and_disks_and_each_is_right(taken: Machines) -> None:
    made = taken
    forks = made.ok("fork", "one", "--count", "2", "--name", "copy", "--network-plugged")["forks"]
    assert [(one["name"], one["error"]) for one in forks] == [(name, "") for name in FORKS]
    assert not [text for one in forks for text in one["warnings"] if "loaded before" in text]
    print(forks)
    # They have the original's address: one of the three is asked at a time.
    for name in (GUEST.name, *FORKS):
        made.virsh("lab-a", "suspend", name)
    for name in (*FORKS, GUEST.name):
        made.virsh("lab-a", "resume", name)
        asyncio.run(sound(made))
        made.virsh("lab-a", "suspend", name)
    for name in FORKS:
        shared, alone = shared_ram(qemu_of(made, name))
        print(name, shared // MIB, alone // MIB)
        assert shared > 16 * MIB
        assert alone > 0
    bases = [OWN_DISK.parent / f"{name}-0.vmckpt-base.qcow2" for name in FORKS]
    blocks = [made.inside("lab-a", "stat", "-c%i %h", str(base)) for base in bases]
    assert blocks[0].stdout == blocks[1].stdout
    assert blocks[0].stdout.split()[1] == "2"
    made.virsh("lab-a", "resume", GUEST.name)
    nothing_left(made)


def test_a_fork_is_a_domain_like_any_other(taken: Machines) -> None:
    made = taken
    forks = made.ok("fork", GUEST.name, "--count", "2", "--name", "copy")["forks"]
    assert [one["error"] for one in forks] == ["", ""]
    xml = made.virsh("lab-a", "dumpxml", FORKS[0])
    assert "<interface type='ethernet'>" in xml
    assert "vmckpt-fork" not in xml
    # A checkpoint of it has what it shares, and it goes on without the other and after a restart.
    made.ok("vm", "stop", FORKS[1], "--force")
    made.ok("vm", "rm", FORKS[1], "--disks")
    made.ok("checkpoint", "create", FORKS[0], "--name", "of-fork")
    made.ok("checkpoint", "restore", "of-fork", "--in-place", "--yes")
    free = lambda: made.ok("vm", "show", FORKS[0])["operation"] is None  # noqa: E731
    eventually(free, 60, "all memory to be loaded")
    made.ok("vm", "stop", FORKS[0], "--force")
    made.ok("vm", "start", FORKS[0])
    made.ok("vm", "stop", FORKS[0], "--force")
    made.ok("vm", "rm", FORKS[0], "--disks")
    nothing_of_forks_left(made)
    asyncio.run(sound(made))


def test_a_name_in_use_fails_its_fork_alone(taken: Machines) -> None:
    made = taken
    made.ok("checkpoint", "restore", "one", "--as", FORKS[0])
    done = made.vmckpt("fork", "one", "--count", "2", "--name", "copy")
    assert done.code == 7
    failed, ran = done.result["forks"]
    assert "there is a VM 'copy-1' already" in failed["error"]
    assert "choose another name for the forks (--name)" in failed["error"]
    assert ran["error"] == ""
    for name in FORKS:
        made.ok("vm", "stop", name, "--force")
        made.ok("vm", "rm", name, "--disks")
    nothing_of_forks_left(made)


def test_it_migrates_and_takes_its_base_along(taken: Machines) -> None:
    made = taken
    made.ok("fork", "one", "--count", "1", "--name", "copy", "--network-plugged")
    made.virsh("lab-a", "suspend", GUEST.name)
    made.ok("migrate", FORKS[0], "lab-b")
    asyncio.run(sound(made))
    assert made.inside("lab-b", "ls", str(OWN_DISK.parent)).stdout.split() == ["copy-1-0.qcow2"]
    made.ok("vm", "stop", FORKS[0], "--force")
    made.ok("vm", "rm", FORKS[0], "--disks")
    nothing_of_forks_left(made)
    made.virsh("lab-a", "resume", GUEST.name)


def test_what_cannot_be_shared_is_said_and_each_has_its_own(secured: Machines) -> None:
    for made in domain(secured, VIRT_INSTALL, balloon="virtio' freePageReporting='on"):
        asyncio.run(_loaded(made))
        (fork,) = made.ok("fork", GUEST.name, "--name", "copy", "--network-plugged")["forks"]
        assert fork["error"] == ""
        (said,) = [text for text in fork["warnings"] if "loaded before" in text]
        assert "freePageReporting" in said
        assert shared_ram(qemu_of(made, FORKS[0])) == (0, 0)
        made.virsh("lab-a", "suspend", GUEST.name)
        asyncio.run(sound(made))
        made.ok("vm", "stop", FORKS[0], "--force")
        made.ok("vm", "rm", FORKS[0], "--disks")


@pytest.mark.parametrize("moment", ["loading", pytest.param("second", marks=pytest.mark.long)])
def test_killed_it_leaves_whole_forks_or_none(taken: Machines, moment: str) -> None:
    made = taken
    command = made.begin("fork", "one", "--count", "2", "--name", "copy")
    there = {
        "loading": "test -e /dev/shm/vmckpt-fork-*/ram",
        "second": f"test -e {OWN_DISK.parent}/copy-2-0.qcow2",
    }[moment]
    eventually(lambda: made.inside("lab-a", "sh", "-c", there).code == 0, 60, moment)
    for job in made.jobs():
        kill(job)
    _, stderr = command.communicate(timeout=150)
    assert "Traceback" not in stderr
    left = "ls /var/lib/vmckpt/libvirt/*/restore* /dev/shm/vmckpt-fork-*"
    eventually(lambda: not made.inside("lab-a", "sh", "-c", left).stdout, 120, "its recovery")
    for name in set(made.virsh("lab-a", "list", "--all", "--name").split()) - {GUEST.name}:
        assert made.ok("vm", "show", name)["state"] == "running"
        made.ok("vm", "stop", name, "--force")
        made.ok("vm", "rm", name, "--disks")
    nothing_of_forks_left(made)
    assert states(made)["lab-a"] == "running"
    asyncio.run(sound(made))
