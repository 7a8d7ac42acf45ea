"""A VM's life on one host, and its internal snapshots."""

import asyncio
import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.world import World, image, qemu, read, world
from tests.waiting import eventually
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import REPLY_TIMEOUT_S, session
from vmckpt.vm.inventory import read_vm


def guest() -> LabGuest:
    return LabGuest("one", 1, image(), vcpus=2)


@pytest.fixture(params=["10.0", "7.2"])
def made(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(qemu(request.param)) as one:
        one.run_guest(guest(), "lab-a")
        yield one


async def stop_it(made: World) -> None:
    vm = await read_vm(made.asked("lab-a"), "one")
    assert vm is not None
    async with session(await vm.host.connect(vm.qemu.files.operator), vm.name) as monitor:
        await commands.stop(monitor)


def test_run_show_stop_start_rm(made: World) -> None:
    async def wait() -> None:
        control = await guest().control(made.lab)
        await control.close()

    asyncio.run(wait())
    shown = made.ok("vm", "show", "one")
    (seen,) = made.ok("top", "--once")["vms"]
    assert seen.items() >= shown.items()
    assert (seen["operation"], seen["replication"], seen["checkpoints"]) == (None, None, None)
    assert (shown["state"], shown["vcpus"], shown["accel"]) == ("running", 2, "tcg")
    # Whoever stopped it: it can go on as it is, and once.
    asyncio.run(stop_it(made))
    assert made.ok("vm", "show", "one")["state"] == "paused"
    made.ok("vm", "start", "one")
    assert made.ok("vm", "show", "one")["state"] == "running"
    assert made.vmckpt("vm", "start", "one").code == 4
    root = made.lab.host("lab-a").state_dir
    for path in (root / "vms").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600) or path.suffix in (".log", ".sock"), path
    refused = made.vmckpt("vm", "rm", "one")
    assert (refused.code, "runs" in refused.error["what"]) == (4, True)
    made.ok("vm", "stop", "one", "--timeout", "80s")
    assert made.ok("vm", "show", "one")["state"] == "stopped"
    assert made.qemus() == []
    assert made.vmckpt("migrate", "one", "lab-a").code == 4
    entry = made.state_dir / "hosts" / "lab-a.json"
    before, files = entry.read_text(), made.files("lab-a")
    entry.write_text(json.dumps(json.loads(before) | {"bridge": None}))
    # Its QEMU is there when that is noticed; the VM is what it was.
    refused = made.vmckpt("vm", "start", "one")
    assert (refused.code, "has no bridge" in refused.error["what"]) == (4, True)
    assert made.ok("vm", "show", "one")["state"] == "stopped"
    assert (made.files("lab-a"), made.qemus()) == (files, [])
    entry.write_text(before)
    made.ok("vm", "start", "one")
    assert made.ok("vm", "list")["vms"][0]["state"] == "running"
    made.ok("vm", "stop", "one", "--force")
    made.ok("vm", "rm", "one")
    assert made.files("lab-a") == []
    assert made.ok("vm", "list")["vms"] == []


def test_a_snapshot_brings_memory_and_disk_back(made: World) -> None:
    async def save_change_load() -> None:
        before = await guest().control(made.lab)
        await before.load_memory("rate=5M set=16M")
        await before.load_disk("rate=1M size=16M")
        client = await guest().key_value(made.lab)
        await client.set("when", "before")
        await _strangers_channels(made)
        saved = await asyncio.to_thread(made.ok, "snapshot", "save", "one", "first")
        assert saved["state_bytes"] > 16 << 20
        await client.set("when", "after")
        refused = await asyncio.to_thread(made.vmckpt, "snapshot", "save", "one", "first")
        assert (refused.code, "already" in refused.error["what"]) == (4, True)
        await _strangers_channels(made)
        await asyncio.to_thread(made.ok, "snapshot", "load", "one", "first")
        # The guest's end of the connection went back in time with it: a new one asks.
        fresh = await guest().key_value(made.lab)
        assert await fresh.get("when") == "before"
        after = await guest().control(made.lab)
        assert (await after.verify_memory()).sound
        assert (await after.verify_disk()).sound
        for connection in (before, client, fresh, after):
            await connection.close()

    asyncio.run(save_change_load())
    names = [s["name"] for s in made.ok("snapshot", "list", "one")["snapshots"]]
    assert names == ["first"]
    made.ok("snapshot", "delete", "one", "first")
    assert made.ok("snapshot", "list", "one")["snapshots"] == []
    missing = made.vmckpt("snapshot", "delete", "one", "first")
    assert (missing.code, "no snapshot" in missing.error["what"]) == (3, True)
    assert made.vmckpt("snapshot", "load", "one", "first").code == 3
    assert made.ok("vm", "show", "one")["state"] == "running"


async def _strangers_channels(made: World) -> None:
    """Someone has it migrate over several channels, or did and was killed."""
    vm = await read_vm(made.asked("lab-a"), "one")
    assert vm is not None
    async with session(await vm.host.connect(vm.qemu.files.operator), "one") as monitor:
        await commands.migrate_set_capabilities(monitor, {"multifd": True})


def test_a_vm_is_paused_resumed_and_rebooted(made: World) -> None:
    """It does what it is told once, is the same machine after a reset, another after a reboot."""

    async def booted() -> None:
        await (await guest().control(made.lab)).close()

    asyncio.run(booted())
    pid = made.ok("vm", "show", "one")["pid"]
    for _ in range(2):
        made.ok("vm", "pause", "one")
        assert made.ok("vm", "show", "one")["state"] == "paused"
    refused = made.vmckpt("vm", "reboot", "one")
    assert (refused.code, refused.error["remedy"]) == (
        4,
        "resume it first: vmckpt vm resume one",
    )
    for _ in range(2):
        made.ok("vm", "resume", "one")
        assert made.ok("vm", "show", "one")["state"] == "running"
    console = Path(made.ok("vm", "show", "one")["console_log"])
    boots = read(console).count("VK-READY")
    made.ok("vm", "reboot", "one", "--force")
    eventually(lambda: read(console).count("VK-READY") > boots, 60, "it has booted again")
    assert made.ok("vm", "show", "one")["pid"] == pid
    asyncio.run(booted())
    started = made.ok("vm", "reboot", "one", "--timeout", "80s")
    assert (started["state"], started["reset"]) == ("running", False)
    assert made.ok("vm", "show", "one")["pid"] != pid
    assert len(made.qemus("one")) == 1
    made.ok("vm", "stop", "one", "--force")
    for word in ("pause", "resume", "reboot"):
        refused = made.vmckpt("vm", word, "one")
        assert (refused.code, refused.error["remedy"]) == (4, "start it: vmckpt vm start one")


@pytest.mark.parametrize("kind", ["raw", "none"])
def test_a_vm_that_cannot_have_snapshots_is_refused_before_it_pauses(kind: str) -> None:
    disk = None if kind == "none" else "64M"
    two = LabGuest("two", 2, image(), disk=disk, disk_format="raw")
    with world(qemu("10.0")) as made:
        made.run_guest(two, "lab-a")
        refused = made.vmckpt("snapshot", "save", "two", "first")
        assert refused.code == 4
        assert ("raw" if kind == "raw" else "no writable disk") in refused.error["why"]
        shown = made.ok("vm", "show", "two")
        assert shown["state"] == "running"
        log = (made.lab.host("lab-a").state_dir / "vms/two").glob("qemu-*/stderr.log")
        assert "running 0" not in next(log).read_text()


@pytest.mark.long
def test_a_snapshot_takes_as_long_as_it_takes(made: World) -> None:
    """QEMU answers nothing meanwhile: longer than any other command would be waited for."""

    def slowly(*words: str) -> None:
        (before,) = made.qemus("one")
        command = made.begin("snapshot", *words)
        log = next((made.lab.host("lab-a").state_dir / "vms/one").glob("qemu-*/stderr.log"))
        stops = log.read_text().count("running 0")
        eventually(lambda: log.read_text().count("running 0") > stops, 20, "it is stopped")
        os.kill(before.pid, signal.SIGSTOP)
        try:
            time.sleep(REPLY_TIMEOUT_S + 2)
        finally:
            os.kill(before.pid, signal.SIGCONT)
        out, err = command.communicate(timeout=60)
        assert command.returncode == 0, out + err
        assert made.ok("vm", "show", "one")["state"] == "running"

    async def play() -> None:
        control = await guest().control(made.lab)
        await control.load_memory("rate=5M set=64M content=random")
        await control.close()
        await asyncio.to_thread(slowly, "save", "one", "slow")
        await asyncio.to_thread(slowly, "load", "one", "slow")

    asyncio.run(play())
