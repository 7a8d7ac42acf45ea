"""Checkpoints of libvirt's domains: taken while they run, and restored into libvirt."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.test_checkpoint import load as load_guest
from tests.qemu.test_checkpoint import sound as is_sound
from tests.real.domains import (
    GUEST,
    MEMORY,
    OWN_DISK,
    SCREEN,
    VIRT_INSTALL,
    DomainMemory,
    remove_domain,
    run_domain,
    start_libvirtd,
    states,
    stop_libvirtd,
)
from tests.real.machines import Machines
from tests.waiting import eventually
from vmckpt.hosts.processes.process import kill
from vmckpt.lab.guests.guest import GuestControl

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(400)]
COPY = "dom-2"


DEVICES = {"vga": SCREEN.format(card="vga"), "virt-install": VIRT_INSTALL}


@pytest.fixture(params=DEVICES)
def screened(secured: Machines, request: pytest.FixtureRequest) -> Iterator[Machines]:
    """A domain on lab-a as people have them: anonymous memory, a screen, USB, a disk."""
    yield from domain(secured, DEVICES[request.param])


@pytest.fixture
def domain_here(secured: Machines) -> Iterator[Machines]:
    """The same with one kind of screen, for tests that are not about it."""
    yield from domain(secured, DEVICES["vga"])


def domain(
    made: Machines, devices: str, balloon: str = "virtio", memory: DomainMemory = MEMORY
) -> Iterator[Machines]:
    try:
        run_domain(made, "lab-a", disk=OWN_DISK, devices=devices, balloon=balloon, memory=memory)
        yield made
    finally:
        words = ("virsh", "--connect", "qemu:///system")
        for action in ("destroy", "undefine"):
            made.inside("lab-a", *words, action, COPY)
        remove_domain(made)
        if taken := made.ok("checkpoint", "list")["checkpoints"]:
            made.ok("checkpoint", "rm", *(one["id"] for one in taken), "--yes")
        made.inside("lab-a", "rm", "-rf", "/var/lib/vmckpt/libvirt")


async def load(made: Machines) -> GuestControl:
    control = await GUEST.control(made.lab)
    await load_guest(control)
    return control


async def booted(made: Machines) -> None:
    control = await GUEST.control(made.lab)
    await control.close()


async def taken_under_load(made: Machines, name: str) -> None:
    control = await load(made)
    await asyncio.to_thread(take, made, name)
    await control.close()


async def sound(made: Machines) -> None:
    await is_sound(made, GUEST)


def take(made: Machines, name: str) -> dict[str, Any]:
    return made.ok("checkpoint", "create", GUEST.name, "--name", name)


def asked(made: Machines, command: str) -> Any:
    """What the domain's QEMU answers."""
    words = json.dumps({"execute": command})
    return json.loads(made.virsh("lab-a", "qemu-monitor-command", GUEST.name, words))["return"]


def nothing_left(made: Machines) -> None:
    """Neither in its QEMU nor beside it; and it runs, by libvirt's word and by QEMU's."""
    nodes = asked(made, "query-named-block-nodes")
    assert not [node["node-name"] for node in nodes if "vmckpt" in node["node-name"]]
    assert not [node for node in nodes if node.get("dirty-bitmaps")]
    assert asked(made, "query-fdsets") == []
    assert asked(made, "query-block-exports") == []
    assert asked(made, "query-status")["running"]
    assert states(made) == {"lab-a": "running"}
    eventually(lambda: files(made) <= {"identity", "checkpoint"}, 60, "all memory to be loaded")


def files(made: Machines) -> set[str]:
    """What is kept of the domain on its host."""
    left = made.inside("lab-a", "sh", "-c", "ls -d /var/lib/vmckpt/libvirt/*/*").stdout.split()
    return {Path(path).name for path in left}


def xml(made: Machines, *words: str) -> str:
    return made.virsh("lab-a", "dumpxml", GUEST.name, "--security-info", *words)


def test_a_domain_under_load_is_taken_and_is_the_same_guest_again(screened: Machines) -> None:
    made = screened
    asyncio.run(booted(made))  # its agent is connected from then on
    live, definition = xml(made), xml(made, "--inactive")

    async def run() -> list[dict[str, Any]]:
        control = await load(made)
        taken = []
        for number in range(3):
            await asyncio.sleep(0.5)
            taken.append(await asyncio.to_thread(take, made, f"point-{number}"))
            assert (await control.stat()).mem_errors == 0
            await asyncio.to_thread(nothing_left, made)
        await control.close()
        return taken

    taken = asyncio.run(run())
    assert (xml(made), xml(made, "--inactive")) == (live, definition)
    assert all(0 < one["pause_ms"] < 2000 for one in taken)
    assert all(one["domain"].keys() == {"uuid"} for one in taken)  # no XML, which has passwords
    assert taken[2]["stored"] < taken[0]["stored"]
    log = made.inside("lab-a", "cat", f"/var/log/libvirt/qemu/{GUEST.name}.log").stdout
    assert "custom-monitor" in log
    listed = made.ok("checkpoint", "list", GUEST.name)["checkpoints"]
    assert [one["parent"] for one in listed] == [None, taken[0]["id"], taken[1]["id"]]
    for number in (0, 2, 1):
        done = made.ok("checkpoint", "restore", f"point-{number}", "--in-place", "--yes")
        print(f"point-{number}: pause {taken[number]['pause_ms']} ms", done)
        asyncio.run(sound(made))
        nothing_left(made)
        assert xml(made, "--inactive") == definition
    again = take(made, "again")
    assert again["parent"] == taken[1]["id"]
    made.ok("checkpoint", "verify", "again")


def test_a_copy_is_a_domain_of_its_own(domain_here: Machines) -> None:
    made = domain_here

    asyncio.run(taken_under_load(made, "one"))
    runs = made.ok("checkpoint", "restore", "one", "--as", COPY)
    assert (runs["vm"], runs["host"]) == (COPY, "lab-a")
    copied = made.virsh("lab-a", "dumpxml", COPY)
    assert "<interface type='ethernet'>" in copied
    assert made.virsh("lab-a", "domuuid", COPY) != made.virsh("lab-a", "domuuid", GUEST.name)
    macs = [made.virsh("lab-a", "domiflist", name).split()[-1] for name in (COPY, GUEST.name)]
    assert macs[0] != macs[1]
    assert made.virsh("lab-a", "dominfo", COPY).split("Persistent:")[1].split()[0] == "yes"
    asyncio.run(sound(made))  # the original never noticed
    taken = made.vmckpt("checkpoint", "restore", "one", "--as", COPY)
    assert (taken.code, "there is a VM 'dom-2' already" in taken.error["what"]) == (4, True)
    made.virsh("lab-a", "destroy", COPY)
    made.virsh("lab-a", "undefine", COPY)
    made.inside("lab-a", "sh", "-c", f"rm {OWN_DISK.parent}/{COPY}-*")
    # With the original's addresses, while that is off, it can be asked.
    made.virsh("lab-a", "destroy", GUEST.name)
    made.ok("checkpoint", "restore", "one", "--as", COPY, "--network", "plugged", "--keep-macs")
    asyncio.run(sound(made))


def test_any_libvirt_continues_what_was_exported(domain_here: Machines) -> None:
    made = domain_here

    asyncio.run(taken_under_load(made, "one"))
    made.virsh("lab-a", "destroy", GUEST.name)
    made.virsh("lab-a", "undefine", GUEST.name)
    directory = made.shared / "dom-exported"
    try:
        done = made.ok("checkpoint", "export", "one", str(directory))
        assert sorted(path.name for path in directory.iterdir()) == [
            "domain.xml", "memory.save", "vda.qcow2",
        ]  # fmt: skip
        assert Path(done["image"]).stat().st_mode & 0o777 == 0o600
        made.virsh("lab-a", "restore", done["image"])
        asyncio.run(sound(made))
        made.virsh("lab-a", "define", done["definition"])
        assert states(made) == {"lab-a": "running"}
    finally:
        made.virsh("lab-a", "destroy", GUEST.name)
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


def in_the_middle(made: Machines) -> bool:
    """Whether a checkpoint has put something into the domain's QEMU."""
    found = made.inside("lab-a", "sh", "-c", "ls /var/lib/vmckpt/libvirt/*/qemu-*/old-blocks-0")
    return found.code == 0


def test_libvirtds_restart_in_the_middle_is_named_and_nothing_is_left(
    domain_here: Machines,
) -> None:
    made = domain_here

    asyncio.run(_loaded(made))
    command = made.begin("checkpoint", "create", GUEST.name)
    eventually(lambda: in_the_middle(made), 60, "the checkpoint to use its QEMU")
    stop_libvirtd(made, "lab-a", "KILL")
    time.sleep(1.0)
    start_libvirtd(made, "lab-a")
    _, stderr = command.communicate(timeout=150)
    assert command.returncode == 7, stderr
    assert "libvirtd of lab-a ended or was restarted" in stderr
    assert "Traceback" not in stderr
    nothing_left(made)
    asyncio.run(sound(made))
    assert made.ok("checkpoint", "list", GUEST.name)["checkpoints"] == []
    take(made, "afterwards")


async def _loaded(made: Machines) -> None:
    await (await load(made)).close()


def test_a_killed_checkpoint_leaves_a_guest_that_runs(domain_here: Machines) -> None:
    made = domain_here
    asyncio.run(_loaded(made))
    for _ in range(3):
        command = made.begin("checkpoint", "create", GUEST.name)
        eventually(lambda: in_the_middle(made), 60, "the checkpoint to use its QEMU")
        for job in made.jobs():
            kill(job)
        _, stderr = command.communicate(timeout=90)
        assert command.returncode != 0, stderr
        assert "Traceback" not in stderr
        eventually(lambda: not in_the_middle(made), 60, "its recovery")
        nothing_left(made)
    asyncio.run(sound(made))
    take(made, "afterwards")


@pytest.mark.parametrize("phase", ["making", "saving", "switching"])
def test_a_killed_restore_leaves_one_guest_that_is_right(domain_here: Machines, phase: str) -> None:
    made = domain_here
    asyncio.run(_loaded(made))
    take(made, "one")
    command = made.begin("checkpoint", "restore", "one", "--in-place", "--yes")
    record = f"grep -q {phase} /var/lib/vmckpt/libvirt/*/restore.json"
    eventually(lambda: made.inside("lab-a", "sh", "-c", record).code == 0, 60, f"it to be {phase}")
    for job in made.jobs():
        kill(job)
    _, stderr = command.communicate(timeout=120)
    assert "Traceback" not in stderr
    left = "ls /var/lib/vmckpt/libvirt/*/restore* /var/lib/libvirt/images/dom.qcow2?*"
    seen = f"{left}; cat /var/lib/vmckpt/libvirt/*/restore.json; virsh -c qemu:///system list --all"
    eventually(
        lambda: not made.inside("lab-a", "sh", "-c", left).stdout,
        120,
        lambda: f"its recovery to end: {made.inside('lab-a', 'sh', '-c', seen).stdout}",
    )
    nothing_left(made)
    asyncio.run(sound(made))


def test_what_cannot_be_taken_is_refused_by_name(domain_here: Machines) -> None:
    made = domain_here
    for words, why in (
        (("--kind", "file"), "libvirt domain"),
        (("--store", "lab-b:"), "does not see"),
    ):
        refused = made.vmckpt("checkpoint", "create", GUEST.name, *words)
        assert (refused.code, why in json.dumps(refused.error)) == (4, True), refused.stderr
    made.ok("vm", "pause", GUEST.name)
    refused = made.vmckpt("checkpoint", "create", GUEST.name)
    assert (refused.code, refused.error["what"]) == (4, f"'{GUEST.name}' is paused")
    made.ok("vm", "resume", GUEST.name)
    assert states(made) == {"lab-a": "running"}


def test_a_schedule_takes_them(domain_here: Machines) -> None:
    made = domain_here
    made.ok("schedule", "add", GUEST.name, "--every", "1h", "--keep-last", "2")
    try:
        made.ok("schedule", "run-due")
        assert len(made.ok("checkpoint", "list", GUEST.name)["checkpoints"]) == 1
        nothing_left(made)
    finally:
        made.ok("schedule", "rm", GUEST.name)
