"""Replication of real guests: whoever dies, the guest goes on once, and no answer is taken back."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.world import World, image, qemu, world
from tests.waiting import eventually
from vmckpt.errors import BusyError
from vmckpt.hosts.processes.process import find_by_argument, identify
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.network import shape_link

NAME = "guest"
OLD_KERNEL = Path(__file__).parents[1] / "old_kernel"


@contextmanager
def protected(version: str, *words: str) -> Iterator[tuple[World, LabGuest]]:
    """A guest on lab-a, in two worlds of QEMU's making, with lab-b as its standby."""
    guest = LabGuest(NAME, 1, image(), memory="160M", disk=None)
    with world(qemu(version), qemu(version)) as made:
        made.run_guest(guest, "lab-a")
        asyncio.run(_ready(made, guest))
        try:
            started = made.ok("replicate", "start", NAME, "lab-b", *words)
            assert started["state"] == "protected"
            yield made, guest
        finally:
            made.vmckpt("replicate", "stop", NAME)


async def _ready(made: World, guest: LabGuest) -> None:
    control = await guest.control(made.lab)
    await control.close()


@asynccontextmanager
async def asked_all_the_time(made: World, guest: LabGuest) -> AsyncIterator[None]:
    """For the block and two answers more: every answer over one connection is the right one.

    Meanwhile the guest computes, and in the end all of its memory is as it must be.
    """
    client = await guest.key_value(made.lab)
    control = await guest.control(made.lab)
    await control.load_memory("rate=10M set=32M pattern=uniform content=random")
    answers, over = 0, asyncio.Event()

    async def ask() -> None:
        nonlocal answers
        more = 2
        while more:
            more -= over.is_set()
            assert await client.incr("count") == answers + 1
            answers += 1

    asking = asyncio.ensure_future(ask())
    await asyncio.sleep(1.0)
    assert answers
    try:
        yield
    finally:
        over.set()
        await asking
    memory = await control.verify_memory()
    assert memory.sound, memory
    await client.close()
    await control.close()


def services(made: World, role: str) -> list[int]:
    mark = f"replica\0{role}\0{made.state_dir}"
    return [process.pid for process in find_by_argument(mark)]


def primary_qemu(made: World) -> int:
    current = made.state("lab-a") / "vms" / NAME / "vm.json"
    return int(json.loads(current.read_text())["pid"])


def sides(made: World) -> dict[str, Any]:
    return {side["role"]: side for side in made.ok("replicate", "status", NAME)["sides"]}


def is_only_on(made: World, host: str) -> bool:
    listed = made.ok("vm", "list")["vms"]
    homes = [(vm["host"], vm["state"]) for vm in listed]
    return homes == [(host, "running")] and len(made.qemus(NAME)) == 1


@pytest.mark.long
def test_a_guest_that_writes_faster_than_the_link_takes_is_named_at_the_start() -> None:
    guest = LabGuest(NAME, 1, image(), memory="160M", disk=None)
    with world(qemu("10.0"), qemu("10.0")) as made:
        made.run_guest(guest, "lab-a")

        async def write() -> None:
            control = await guest.control(made.lab)
            await control.load_memory("rate=60M set=64M pattern=uniform content=random touch=page")
            await control.close()
            await shape_link(made.lab, "lab-b", 4 << 20)

        asyncio.run(write())
        try:
            (warning,) = made.ok("replicate", "start", NAME, "lab-b")["warnings"]
            assert "the guest writes" in warning
            assert "the link transfers" in warning
            told = sides(made)["primary"]
            assert told["written_bytes_per_s"] > told["link_bytes_per_s"] > 1 << 20
            eventually(lambda: sides(made)["primary"]["slowed_percent"] > 0, 60, "it is slowed")
            assert sides(made)["primary"]["state"] == "protected"
        finally:
            made.vmckpt("replicate", "stop", NAME)


async def in_background(work: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work)


def promoted(made: World) -> bool:
    return bool(sides(made).get("standby", {}).get("state") == "promoted")


@pytest.mark.parametrize("version", ["10.0", pytest.param("7.2", marks=pytest.mark.long)])
def test_a_killed_primary_is_replaced_and_no_answer_is_taken_back(version: str) -> None:
    with protected(version) as (made, guest):
        assert sides(made)["primary"]["tracker"] == "page protection"
        asyncio.run(_kill_all_of_the_primary(made, guest))
        eventually(lambda: is_only_on(made, "lab-b"), 10, "one guest, on lab-b")
        after = sides(made)["standby"]
        assert (after["state"], after["term"]) == ("promoted", 2)
        mark = made.state("lab-b") / "vms" / NAME / "taken-over"
        assert mark.read_text() == after["run"]  # so it asks the arbiter before each start
        # And back: the new primary is protected by the old one's host.
        made.ok("replicate", "stop", NAME)
        assert made.ok("replicate", "start", NAME, "lab-a")["term"] == 3


@pytest.mark.long
def test_a_kernel_without_pagemap_scan_protects_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(OLD_KERNEL))
    with protected("10.0", "--epoch", "auto") as (made, guest):
        assert sides(made)["primary"]["tracker"] == "comparison"
        asyncio.run(_kill_all_of_the_primary(made, guest))
        eventually(lambda: is_only_on(made, "lab-b"), 10, "one guest, on lab-b")


async def _kill_all_of_the_primary(made: World, guest: LabGuest) -> None:
    async with asked_all_the_time(made, guest):
        for pid in [*services(made, "primary"), primary_qemu(made)]:
            os.kill(pid, signal.SIGKILL)
        await in_background(lambda: eventually(partial(promoted, made), 30, "lab-b goes on"))


@pytest.mark.long
@pytest.mark.parametrize("who", ["qemu", "service", "frozen service", "frozen qemu"])
def test_a_part_of_the_primary_dies_or_freezes(who: str) -> None:
    with protected("10.0") as (made, guest):
        asyncio.run(_harm_the_primary(made, guest, who))
        eventually(lambda: is_only_on(made, "lab-b"), 20, "one guest, on lab-b")


async def _harm_the_primary(made: World, guest: LabGuest, who: str) -> None:
    async with asked_all_the_time(made, guest):
        number = signal.SIGSTOP if "frozen" in who else signal.SIGKILL
        pids = [primary_qemu(made)] if "qemu" in who else services(made, "primary")
        for pid in pids:
            os.kill(pid, number)
        await in_background(lambda: eventually(partial(promoted, made), 45, "lab-b goes on"))
        if "frozen" in who:
            assert [identify(pid) for pid in pids] == [None] * len(pids)  # fenced


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_its_standby_the_guest_goes_on_alone(how: signal.Signals) -> None:
    with protected("10.0") as (made, guest):
        frozen = services(made, "standby")
        asyncio.run(_lose_the_standby(made, guest, how))
        told = sides(made)["primary"]
        assert (told["state"], told["ending"]) == ("ended", "alone")
        if how is signal.SIGSTOP:
            # It finds that it is of no use, and takes nothing over.
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
            eventually(lambda: not services(made, "standby"), 20, "the standby has ended")
            eventually(lambda: is_only_on(made, "lab-a"), 10, "one guest, on lab-a")
        made.ok("replicate", "stop", NAME)
        eventually(lambda: is_only_on(made, "lab-a"), 10, "nothing is left on lab-b")
        made.ok("replicate", "start", NAME, "lab-b")


def test_a_guest_that_goes_on_alone_moves_to_its_standbys_host_and_back() -> None:
    """It was neither started nor protected there, as if its standby had taken it over."""
    with protected("10.0") as (made, _):
        for pid in services(made, "standby"):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not services(made, "primary"), 30, "it goes on alone")
        eventually(partial(_moved, made), 30, "its protection to be cleaned up on both hosts")
        assert made.ok("replicate", "start", NAME, "lab-a")["state"] == "protected"
        made.ok("replicate", "failover", NAME)
        made.ok("migrate", NAME, "lab-b")
        made.ok("vm", "stop", NAME, "--force")
        made.ok("vm", "start", NAME)
        assert is_only_on(made, "lab-b")


def _moved(made: World) -> bool:
    """Migrate it to lab-b; False if one of the hosts is busy."""
    done = made.vmckpt("migrate", NAME, "lab-b")
    assert done.code in (0, BusyError.exit_code), done.stderr
    return done.code == 0


async def _lose_the_standby(made: World, guest: LabGuest, how: signal.Signals) -> None:
    async with asked_all_the_time(made, guest):
        for pid in services(made, "standby"):
            os.kill(pid, how)
        await in_background(
            lambda: eventually(lambda: not services(made, "primary"), 30, "it goes on alone")
        )


@pytest.mark.long
def test_when_both_services_die_the_guest_goes_on_alone() -> None:
    """The guard lets it run, the dead-man's switch waits for the lease and lets its output go."""
    with protected("10.0") as (made, guest):
        asyncio.run(_kill_both_services(made, guest))
        assert sides(made)["primary"]["why"].startswith("alone")
        made.ok("replicate", "stop", NAME)
        eventually(lambda: is_only_on(made, "lab-a"), 10, "one guest, on lab-a")
        # Nothing is left of it: the VM moves like any other.
        made.ok("migrate", NAME, "lab-b")


async def _kill_both_services(made: World, guest: LabGuest) -> None:
    async with asked_all_the_time(made, guest):
        for role in ("standby", "primary"):
            for pid in services(made, role):
                os.kill(pid, signal.SIGKILL)
        runs = "the guest runs within a second"
        await in_background(lambda: eventually(partial(guest_runs, made), 1.0, runs))


@pytest.mark.long
@pytest.mark.parametrize("is_dead", [False, True])
def test_without_its_arbiter_a_guest_goes_on_by_the_operators_word(
    tmp_path: Path, *, is_dead: bool
) -> None:
    """Both services were killed, or the primary and its QEMU; the arbiter is gone for good."""
    leases = tmp_path / "leases"
    with protected("10.0", "--lease", str(leases)) as (made, guest):
        asyncio.run(_go_on_without_arbiter(made, guest, leases, is_dead=is_dead))
        host = "lab-b" if is_dead else "lab-a"
        eventually(lambda: is_only_on(made, host), 10, f"one guest, on {host}")


async def _go_on_without_arbiter(
    made: World, guest: LabGuest, leases: Path, *, is_dead: bool
) -> None:
    """It is paused meanwhile, for longer than clients wait."""
    control = await guest.control(made.lab)
    await control.load_memory("rate=10M set=32M pattern=uniform content=random")
    leases.rename(leases.with_name("gone"))
    leases.write_text("no directory")
    for role in ("primary",) if is_dead else ("standby", "primary"):
        for pid in services(made, role):
            os.kill(pid, signal.SIGKILL)
    words = ["stop", NAME]
    if is_dead:
        os.kill(primary_qemu(made), signal.SIGKILL)
        words = ["failover", NAME, "--primary-is-dead"]
    await in_background(lambda: made.ok("replicate", *words))
    memory = await control.verify_memory()
    assert memory.sound, memory
    await control.close()


def guest_runs(made: World) -> bool:
    return bool(made.ok("vm", "show", NAME)["state"] == "running")


@pytest.mark.long
def test_a_guest_is_handed_over_and_back() -> None:
    with protected("10.0") as (made, guest):
        asyncio.run(_hand_over(made, guest))
        eventually(lambda: is_only_on(made, "lab-b"), 10, "one guest, on lab-b")


async def _hand_over(made: World, guest: LabGuest) -> None:
    async with asked_all_the_time(made, guest):
        done = await in_background(lambda: made.ok("replicate", "failover", NAME))
        assert done["state"] == "promoted"


@pytest.mark.parametrize(
    "dies", ["standby", pytest.param("standby and primary", marks=pytest.mark.long)]
)
def test_a_standby_that_dies_while_it_is_to_take_over_loses_nobody(dies: str) -> None:
    with protected("10.0") as (made, guest):
        asyncio.run(_die_while_taking_over(made, guest, dies))
        eventually(lambda: is_only_on(made, "lab-a"), 10, "one guest, on lab-a")
        made.ok("replicate", "stop", NAME)
        assert made.ok("replicate", "start", NAME, "lab-b")["state"] == "protected"


async def _die_while_taking_over(made: World, guest: LabGuest, dies: str) -> None:
    async with asked_all_the_time(made, guest):
        (waiting,) = find_by_argument(f"-pidfile\0{made.state('lab-b')}")
        # It does not answer: its standby takes no term before it does. One that dies with the term
        # is in tests/contract and tests/replication_model.
        os.kill(waiting.pid, signal.SIGSTOP)
        asking = made.begin("replicate", "failover", NAME)
        await asyncio.sleep(2.0)
        for role in dies.split(" and "):
            for pid in services(made, role):
                os.kill(pid, signal.SIGKILL)
        out, _ = await in_background(lambda: asking.communicate(timeout=60))
        assert asking.returncode not in (0, None), out
        await in_background(lambda: eventually(partial(guest_runs, made), 30, "lab-a goes on"))


@pytest.mark.long
def test_a_guest_that_powers_off_ends_its_protection() -> None:
    with protected("10.0") as (made, guest):
        asyncio.run(_power_off(made, guest))
        eventually(lambda: not made.qemus(NAME), 30, "no QEMU is left")
        assert sides(made)["primary"]["ending"] == "guest_off"


async def _power_off(made: World, guest: LabGuest) -> None:
    from vmckpt.qemu import commands
    from vmckpt.qemu.monitor import session
    from vmckpt.vm.inventory import read_vm

    vm = await read_vm(made.asked("lab-a"), NAME)
    assert vm is not None
    async with session(await vm.host.connect(vm.qemu.files.onlooker), NAME) as monitor:
        await commands.system_powerdown(monitor)


def test_what_cannot_be_protected_is_refused_with_the_reason() -> None:
    guest = LabGuest(NAME, 1, image(), memory="96M", disk="16M")
    with world(qemu("10.0"), qemu("10.0")) as made:
        made.run_guest(guest, "lab-a")
        refused = made.vmckpt("replicate", "start", NAME, "lab-b")
        assert refused.code == 4
        assert "[disk-shared]" in refused.error["why"]
        assert made.vmckpt("replicate", "start", NAME, "lab-a").code == 4
        assert made.vmckpt("replicate", "status", NAME).code == 3
        assert made.vmckpt("replicate", "stop", NAME).code == 3
        assert made.vmckpt("replicate", "failover", NAME).code == 3
        assert made.vmckpt("replicate", "start", NAME, "lab-b", "--epoch", "0ms").code == 2
        assert not (made.state("lab-b") / "vms" / NAME).exists()


def test_a_paused_guest_is_not_protected_and_stays_paused() -> None:
    """It was resumed as its protection failed: by `keep`, minutes after its user had paused it."""
    guest = LabGuest(NAME, 1, image(), memory="96M", disk=None)
    with world(qemu("10.0"), qemu("10.0")) as made:
        made.run_guest(guest, "lab-a")
        made.ok("vm", "pause", NAME)
        refused = made.vmckpt("replicate", "start", NAME, "lab-b")
        assert [vm["state"] for vm in made.ok("vm", "list")["vms"]] == ["paused"]
        assert refused.code == 4
        assert "[running]" in refused.error["why"]
        assert refused.error["remedy"] == f"vmckpt vm resume {NAME}"
