"""Domains of libvirt move like VMs, and libvirt's own record agrees."""

import asyncio
import signal

import pytest

from tests.qemu.world import loaded
from tests.real.domains import (
    GUEST,
    OWN_DISK,
    await_transfer,
    row,
    start_libvirtd,
    states,
    stop_libvirtd,
)
from tests.real.machines import Machines
from tests.waiting import eventually

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(300)]
SLOWLY = ("--bandwidth", "15MiB/s")


def test_a_domain_moves_there_and_back_encrypted_and_loses_nothing(domain: Machines) -> None:
    facts = domain.ok("vm", "show", GUEST.name)
    assert (facts["driver"], facts["host"], facts["state"]) == ("libvirt", "lab-a", "running")
    for report in domain.ok("host", "doctor", "lab-a", "lab-b")["hosts"]:
        verdicts = {check["code"]: check["verdict"] for check in report["checks"]}
        assert verdicts["libvirtd"] == verdicts["libvirt-tls"] == "ok", report
        assert verdicts["libvirt-certificates"] == "ok", report
    checked = domain.ok("check", GUEST.name, "lab-b")["targets"][0]
    assert checked["possible"], checked
    domain.virsh("lab-a", "autostart", GUEST.name)

    async def move() -> list[dict[str, object]]:
        async with loaded(domain, GUEST):
            return [
                await asyncio.to_thread(domain.ok, "migrate", GUEST.name, *words)
                for words in (("lab-b",), ("lab-a", "--method", "postcopy"))
            ]

    there, back = asyncio.run(move())
    assert (there["method"], back["method"]) == ("precopy", "postcopy")
    for report in (there, back):
        assert report["encryption"] == "x509"
        assert report["transferred_bytes"]
        assert report["guest_downtime_ms"], report
    assert states(domain) == {"lab-a": "running"}
    assert "Autostart:      enable" in domain.virsh("lab-a", "dominfo", GUEST.name)
    assert row(domain)["host"] == "lab-a"
    assert domain.virsh("lab-a", "domstate", "--reason", GUEST.name) == "running (post-copy)" or (
        domain.virsh("lab-a", "domstate", "--reason", GUEST.name) == "running (migrated)"
    )
    outcomes = [run["outcome"] for run in domain.ok("runs", "list")["runs"]]
    assert outcomes[-2:] == ["completed", "completed"]


@pytest.mark.long
def test_libvirts_own_record_of_a_move_agrees_and_the_run_is_told_again(domain: Machines) -> None:
    moved = domain.ok("migrate", GUEST.name, "lab-b")
    record = libvirts_record(domain, "lab-b")
    assert record["memory_processed"] == moved["transferred_bytes"]
    assert record["downtime"] == moved["downtime_ms"]
    assert record["time_elapsed"] / 1000 <= moved["total_time_s"]
    assert domain.ok("runs", "attach", moved["run"]) == moved


def libvirts_record(made: Machines, host: str) -> dict[str, int]:
    """What libvirt itself keeps of the last job of a domain, of its figures that are numbers."""
    said = made.virsh(host, "domjobinfo", GUEST.name, "--completed", "--rawstats")
    pairs = (line.split(":", 1) for line in said.splitlines() if ":" in line)
    return {name.strip(): int(text) for name, text in pairs if text.strip().isdecimal()}


def test_a_disk_of_the_hosts_own_is_copied_and_leaves_the_source(own_disk: Machines) -> None:
    async def move() -> dict[str, object]:
        async with loaded(own_disk, GUEST):
            return await asyncio.to_thread(own_disk.ok, "migrate", GUEST.name, "lab-b")

    assert asyncio.run(move())["outcome"] == "completed"
    images = {host: own_disk.inside(host, "ls", str(OWN_DISK.parent)).stdout.split()
              for host in ("lab-a", "lab-b")}  # fmt: skip
    assert images == {"lab-a": [], "lab-b": [OWN_DISK.name]}
    assert states(own_disk) == {"lab-b": "running"}


@pytest.mark.long
def test_a_drained_hosts_domain_comes_back_with_its_disk(own_disk: Machines) -> None:
    async def main() -> None:
        async with loaded(own_disk, GUEST):
            for action, host in (("drain", "lab-b"), ("undrain", "lab-a")):
                done = await asyncio.to_thread(own_disk.ok, action, "lab-a", "--for", "500ms")
                assert done["moved"] == [{"vm": GUEST.name, "host": host}], done
                assert states(own_disk) == {host: "running"}

    asyncio.run(main())


def test_ctrl_c_gives_it_up_and_leaves_nothing_on_the_target(own_disk: Machines) -> None:
    command = own_disk.begin("migrate", GUEST.name, "lab-b", *SLOWLY)
    await_transfer(own_disk, "lab-a")
    command.send_signal(signal.SIGINT)
    _, stderr = command.communicate(timeout=60)
    assert command.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert states(own_disk) == {"lab-a": "running"}
    assert own_disk.inside("lab-b", "ls", str(OWN_DISK.parent)).stdout.split() == []
    assert own_disk.ok("migrate", GUEST.name, "lab-b")["outcome"] == "completed"


def test_a_domain_that_is_ended_in_the_middle_is_reported_lost(domain: Machines) -> None:
    command = domain.begin("migrate", GUEST.name, "lab-b", *SLOWLY)
    await_transfer(domain, "lab-a")
    domain.virsh("lab-a", "destroy", GUEST.name)
    _, stderr = command.communicate(timeout=90)
    assert command.returncode == 10, stderr
    assert states(domain) == {"lab-a": "shut off"}
    assert domain.ok("vm", "start", GUEST.name)["state"] == "running"


@pytest.mark.long
def test_a_targets_libvirtd_that_ends_leaves_the_domain_at_home(domain: Machines) -> None:
    command = domain.begin("migrate", GUEST.name, "lab-b", *SLOWLY)
    await_transfer(domain, "lab-a")
    stop_libvirtd(domain, "lab-b", "KILL")
    _, stderr = command.communicate(timeout=120)
    start_libvirtd(domain, "lab-b")
    assert command.returncode == 7, stderr
    alone = {"lab-a": "running"}
    eventually(lambda: states(domain) == alone, 30, "lab-b's libvirtd to remove what had arrived")


def test_a_sources_libvirtd_that_ends_is_waited_for_and_recovered(domain: Machines) -> None:
    command = domain.begin("migrate", GUEST.name, "lab-b", *SLOWLY)
    await_transfer(domain, "lab-a")
    stop_libvirtd(domain, "lab-a", "KILL")
    _, stderr = command.communicate(timeout=120)
    assert command.returncode == 9, stderr
    assert "its QEMU on lab-a lives" in stderr
    start_libvirtd(domain, "lab-a")
    recovered = domain.ok("migrate", "--recover", GUEST.name)
    assert recovered["host"] == "lab-a"
    assert states(domain) == {"lab-a": "running"}


def test_a_killed_command_is_tidied_up_after_and_libvirt_goes_on(own_disk: Machines) -> None:
    command = own_disk.begin("migrate", GUEST.name, "lab-b", *SLOWLY)
    await_transfer(own_disk, "lab-a")
    command.kill()
    command.communicate(timeout=60)
    own_disk.vmckpt("migrate", "--recover", GUEST.name)  # or the dead-man's switch has been faster
    assert states(own_disk) == {"lab-b": "running"}
    assert own_disk.inside("lab-a", "ls", str(OWN_DISK.parent)).stdout.split() == []


def test_a_domain_is_paused_resumed_and_rebooted(domain: Machines) -> None:
    name = GUEST.name
    domain.ok("vm", "pause", name)
    assert domain.virsh("lab-a", "domstate", name) == "paused"
    refused = domain.vmckpt("vm", "reboot", name)
    assert (refused.code, refused.error["remedy"]) == (
        4,
        f"resume it first: vmckpt vm resume {name}",
    )
    for _ in range(2):
        domain.ok("vm", "resume", name)
        assert domain.virsh("lab-a", "domstate", name) == "running"
    before = domain.virsh("lab-a", "domid", name)
    domain.ok("vm", "reboot", name, "--force")
    assert domain.virsh("lab-a", "domid", name) == before

    async def booted() -> None:
        await (await GUEST.control(domain.lab)).close()

    asyncio.run(booted())  # so that it hears its power button
    domain.ok("vm", "reboot", name, "--timeout", "80s")
    assert domain.virsh("lab-a", "domid", name) != before
    assert states(domain) == {"lab-a": "running"}


def test_snapshots_are_libvirts_and_keep_a_domain_from_moving(domain: Machines) -> None:
    domain.ok("snapshot", "save", GUEST.name, "one")
    assert domain.virsh("lab-a", "snapshot-list", "--name", GUEST.name).split() == ["one"]
    [listed] = domain.ok("snapshot", "list", GUEST.name)["snapshots"]
    assert listed["name"] == "one"
    refused = domain.vmckpt("migrate", GUEST.name, "lab-b")
    assert refused.code == 4
    assert "[snapshots]" in refused.error["why"]
    domain.ok("snapshot", "load", GUEST.name, "one")
    domain.ok("snapshot", "delete", GUEST.name, "one")
    assert domain.vmckpt("snapshot", "delete", GUEST.name, "one").code == 3
    domain.ok("vm", "stop", GUEST.name, "--force")
    assert states(domain) == {"lab-a": "shut off"}
    assert domain.ok("vm", "rm", GUEST.name)["removed"]
    assert states(domain) == {}
