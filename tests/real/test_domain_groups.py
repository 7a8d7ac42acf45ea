"""Groups of libvirt's domains and other VMs: every cut is consistent, and is gone back to."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.qemu.talking import Witness, conversing, get_on
from tests.qemu.world import image
from tests.real.domains import GUEST, VIRT_INSTALL, on_host
from tests.real.machines import Machines
from tests.real.test_domain_checkpoints import booted, domain, load, nothing_left, sound
from tests.waiting import eventually
from vmckpt.hosts.processes.process import kill
from vmckpt.lab.guests.labguest import LabGuest

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(500)]
OTHERS = [
    LabGuest("web", 2, Path(), memory="96M", disk=None),
    LabGuest("db", 3, Path(), memory="96M", disk=None),
]
HOMES = {GUEST.name: "lab-a", "web": "lab-a", "db": "lab-b"}
EVERY = [GUEST, *OTHERS]


@pytest.fixture
def together(secured: Machines) -> Iterator[Machines]:
    """A domain with a screen, and two VMs of vmckpt's own."""
    for made in domain(secured, VIRT_INSTALL):
        try:
            for other in OTHERS:
                made.run_guest(replace(other, image=image()), HOMES[other.name])
            asyncio.run(booted(made))
            yield made
        finally:
            for other in OTHERS:
                made.vmckpt("vm", "stop", other.name, "--force")
                made.vmckpt("vm", "rm", other.name)


def cut(made: Machines, name: str) -> dict[str, str]:
    words = ("--group", ",".join(HOMES), "--name", name, "--max-hold", "3s")
    done = made.ok("checkpoint", "create", *words)
    print(name, "skew", done["skew_ms"], "held", done["held_ms"],
          {vm: one["pause_ms"] for vm, one in done["members"].items()})  # fmt: skip
    return {vm: one["id"] for vm, one in done["members"].items()}


def test_it_is_one_cut_and_all_go_back_to_it(together: Machines) -> None:
    made = together

    async def run() -> None:
        async with conversing(made, EVERY, rate=50) as controls:
            before, witness = 0, Witness(made, HOMES, EVERY)
            for number in range(4):
                points = await asyncio.to_thread(cut, made, f"cut-{number}")
                wrong, said = witness.violations(points)
                assert not wrong
                assert said > before
                before = said
                await asyncio.to_thread(nothing_left, made)
            for control in controls.values():
                assert (await control.talk()).wrong == 0
        back = ("checkpoint", "restore", "--group", "cut-1", "--in-place", "--yes")
        restored = await asyncio.to_thread(made.ok, *back)
        assert {vm: one["host"] for vm, one in restored["members"].items()} == HOMES
        await get_on(made, EVERY)

    asyncio.run(run())
    nothing_left(made)


@pytest.mark.long
def test_none_goes_back_if_one_cannot(together: Machines) -> None:
    """The domain's guest was saved by then: libvirt has it continue from that."""
    made = together
    asyncio.run(_loaded(made))
    cut(made, "cut")
    before = {other.name: made.ok("vm", "show", other.name)["pid"] for other in OTHERS}
    command = made.begin("checkpoint", "restore", "--group", "cut", "--in-place", "--yes")
    saved = "test -e /var/lib/vmckpt/libvirt/*/restore-*/old-guest.save"
    eventually(lambda: made.inside("lab-a", "sh", "-c", saved).code == 0, 60, "it to be saved")
    for job in on_host(made, "lab-b", made.jobs()):
        kill(job)
    _, stderr = command.communicate(timeout=150)
    assert command.returncode != 0, stderr
    assert "Traceback" not in stderr
    nothing_left(made)
    asyncio.run(sound(made))
    assert {other.name: made.ok("vm", "show", other.name)["pid"] for other in OTHERS} == before


async def _loaded(made: Machines) -> None:
    await (await load(made)).close()
