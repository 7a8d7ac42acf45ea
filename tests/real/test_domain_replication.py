"""Replication of libvirt's domains: failover, failback, and what dies on the way."""

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.domains import (
    GUEST,
    HOSTS,
    OWN_DISK,
    SCREEN,
    on_host,
    qemus,
    remove_domain,
    run_domain,
    start_libvirtd,
    states,
    stop_libvirtd,
)
from tests.real.machines import Machines
from tests.real.test_domain_checkpoints import booted, load, sound
from tests.waiting import eventually
from vmckpt.hosts.processes.process import ProcessId, find_by_argument, kill

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(600)]
NAME = GUEST.name
SERVICES = "replica\0{role}\0/var/lib/vmckpt/replicas/" + NAME


@pytest.fixture
def guest(secured: Machines) -> Iterator[Machines]:
    """A domain on lab-a with a screen, USB and a disk of that host's own, under load."""
    made = secured
    try:
        run_domain(
            made, "lab-a", disk=OWN_DISK, devices=SCREEN.format(card="vga"), balloon="virtio"
        )
        asyncio.run(_loaded(made))
        yield made
    finally:
        for host in HOSTS:
            if made.inside(host, "pgrep", "-x", "libvirtd").code:
                start_libvirtd(made, host)
        made.vmckpt("replicate", "stop", NAME, "--standby-is-dead")
        remove_domain(made)
        for host in HOSTS:
            shell = "rm -rf /var/lib/vmckpt/{libvirt,vms,replicas,replica-events}/*"
            made.inside(host, "bash", "-c", shell)
        shutil.rmtree(leases(made), ignore_errors=True)


async def _loaded(made: Machines) -> None:
    await booted(made)
    await (await load(made)).close()


def leases(made: Machines) -> Path:
    return made.shared / "leases"


def protect(made: Machines, host: str = "lab-b") -> dict[str, Any]:
    return made.ok("replicate", "start", NAME, host, "--lease", str(leases(made)))


def sides(made: Machines) -> dict[str, dict[str, Any]]:
    """The reports of both services, by host."""
    return {side["host"]: side for side in made.ok("replicate", "status", NAME)["sides"]}


def service(made: Machines, host: str, role: str) -> ProcessId:
    [found] = on_host(made, host, find_by_argument(SERVICES.format(role=role)))
    return found


def is_only_on(made: Machines, host: str) -> None:
    """It runs there, persistent, one QEMU in all; the other libvirt has nothing of it."""
    eventually(lambda: states(made) == {host: "running"}, 60, f"it to run on {host} alone")
    eventually(lambda: is_persistent(made, host), 60, "its definition")
    assert [len(qemus(made, each)) for each in HOSTS] == [each == host for each in HOSTS]
    asyncio.run(sound(made))


def is_persistent(made: Machines, host: str) -> bool:
    return NAME in made.virsh(host, "list", "--all", "--persistent", "--name").split()


def left(made: Machines, host: str) -> list[str]:
    """Files about it on a host, besides its image."""
    places = "/var/lib/vmckpt/vms /var/lib/vmckpt/replicas /dev/shm"
    return made.inside(host, "find", *places.split(), "-mindepth", "1", "-type", "f").stdout.split()


def is_clean(made: Machines) -> None:
    """After `replicate stop`."""
    assert {host: left(made, host) for host in HOSTS} == {host: [] for host in HOSTS}


def test_a_domain_fails_over_when_its_qemu_dies_and_back(guest: Machines) -> None:
    made = guest
    assert made.virsh("lab-a", "autostart", NAME)
    protect(made)
    assert not is_persistent(made, "lab-a")  # nothing else starts it there again
    status = sides(made)["lab-a"]
    assert (status["state"], status["output_commit"]) == ("protected", True)
    (qemu,) = qemus(made, "lab-a")
    kill(qemu)
    is_only_on(made, "lab-b")
    assert sides(made)["lab-b"]["state"] == "promoted"
    assert "Autostart:      enable" in made.virsh("lab-b", "dominfo", NAME)
    assert "custom-monitor" not in made.virsh("lab-b", "dominfo", NAME)
    back = made.ok("replicate", "failback", NAME)
    assert back["state"] == "promoted"
    is_only_on(made, "lab-a")
    made.ok("replicate", "stop", NAME)
    is_clean(made)
    is_only_on(made, "lab-a")


@pytest.mark.parametrize(
    "roles",
    [
        ["primary"],
        pytest.param(["standby"], marks=pytest.mark.long),
        pytest.param(["standby", "primary"], marks=pytest.mark.long),
    ],
)
def test_a_service_that_is_killed_loses_nothing(guest: Machines, roles: list[str]) -> None:
    """The standby takes over after the lease; without a standby the primary goes on alone, by its
    recovery if need be.
    """
    made, hosts = guest, {"primary": "lab-a", "standby": "lab-b"}
    protect(made)
    for process in [service(made, hosts[role], role) for role in roles]:
        kill(process)
    if roles == ["primary"]:
        is_only_on(made, "lab-b")
        made.ok("replicate", "failover", NAME)  # removes what lab-a has
    else:
        eventually(lambda: sides(made)["lab-a"]["state"] == "ended", 60, "the protection to end")
        assert sides(made)["lab-a"]["ending"] == "alone"
        is_only_on(made, "lab-a")
    made.ok("replicate", "stop", NAME)
    is_clean(made)


@pytest.mark.long
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("number", ["TERM", "KILL"])
def test_a_libvirtd_that_is_restarted_loses_nothing(
    guest: Machines, host: str, number: str
) -> None:
    """Its standby's ends what waits there, and its own cannot be asked for a while: it runs on."""
    made = guest
    protect(made)
    made.inside(host, "pkill", f"-{number}", "-x", "libvirtd")
    # It waits for half a minute for the call that restores what waits, though that is ended.
    lives = ("pgrep", "-x", "libvirtd")
    eventually(lambda: made.inside(host, *lives).code != 0, 60, "libvirtd to end")
    start_libvirtd(made, host)
    eventually(lambda: sides(made)["lab-a"]["state"] == "ended", 60, "the protection to end")
    said = sides(made)
    assert said["lab-a"]["ending"] == "alone"
    assert "libvirt" in said[host]["why"]
    is_only_on(made, "lab-a")
    protect(made)
    made.ok("replicate", "stop", NAME)
    is_only_on(made, "lab-a")
    is_clean(made)


@pytest.mark.long
def test_a_libvirtd_that_does_not_come_back_gives_the_guest_to_the_standby(
    guest: Machines,
) -> None:
    made = guest
    protect(made)
    stop_libvirtd(made, "lab-a", "KILL")
    eventually(lambda: "lab-b" in _running(made), 90, "the standby to take over")
    start_libvirtd(made, "lab-a")
    is_only_on(made, "lab-b")
    made.ok("replicate", "stop", NAME)
    is_clean(made)


def _running(made: Machines) -> set[str]:
    """The hosts whose libvirtd answers, and says that it runs there."""
    words = ("virsh", "--connect", "qemu:///system", "list", "--state-running", "--name")
    return {host for host in HOSTS if NAME in made.inside(host, *words).stdout.split()}


@pytest.mark.long
def test_a_guest_that_powers_off_is_a_domain_that_is_off(guest: Machines) -> None:
    made = guest
    protect(made)
    _power_off(made)
    eventually(lambda: states(made) == {"lab-a": "shut off"}, 60, "it to be off")
    assert is_persistent(made, "lab-a")
    eventually(lambda: sides(made)["lab-a"]["ending"] == "guest_off", 60, "the end")
    made.ok("replicate", "stop", NAME)
    is_clean(made)
    made.virsh("lab-a", "start", NAME)
    asyncio.run(booted(made))


def _power_off(made: Machines) -> None:
    asyncio.run(booted(made))
    made.virsh("lab-a", "shutdown", NAME)


@pytest.mark.long
def test_a_domain_that_libvirt_saves_is_no_longer_protected(guest: Machines) -> None:
    """It is then saved here, and runs nowhere."""
    made, file = guest, "/var/lib/libvirt/images/saved"
    protect(made)
    made.virsh("lab-a", "save", NAME, file)
    eventually(lambda: sides(made)["lab-a"]["state"] == "ended", 60, "the protection to end")
    eventually(lambda: states(made) == {"lab-a": "shut off"}, 60, "it to be off")
    made.virsh("lab-a", "restore", file)
    is_only_on(made, "lab-a")
    made.ok("replicate", "stop", NAME)
    is_clean(made)


@pytest.mark.long
def test_both_hosts_lose_it_and_stop_gives_it_back(guest: Machines) -> None:
    """As after a power cut: nothing of it runs; libvirt on lab-a has its definition again."""
    made = guest
    protect(made)
    for process in (
        service(made, "lab-b", "standby"),
        service(made, "lab-a", "primary"),
        *qemus(made, "lab-b"),
        *qemus(made, "lab-a"),
    ):
        kill(process)
    eventually(lambda: not states(made), 60, "both libvirts to have nothing of it")
    assert f"vmckpt replicate stop {NAME}" in made.vmckpt("vm", "start", NAME).stderr
    made.ok("replicate", "stop", NAME)
    assert states(made) == {"lab-a": "shut off"}
    is_clean(made)
    made.virsh("lab-a", "start", NAME)
    asyncio.run(booted(made))


@pytest.mark.long
def test_one_that_was_taken_over_is_a_domain_as_any_other(guest: Machines) -> None:
    """Its memory is a file without a name: checkpoints, and libvirt's migration, find it there."""
    made = guest
    protect(made)
    made.ok("replicate", "failover", NAME)
    is_only_on(made, "lab-b")
    made.ok("replicate", "stop", NAME)
    is_clean(made)
    made.ok("checkpoint", "create", NAME, "--name", "point")
    asyncio.run(sound(made))
    assert made.inside("lab-a", "rm", str(OWN_DISK)).code == 0  # of before the takeover
    made.ok("migrate", NAME, "lab-a")
    is_only_on(made, "lab-a")
    made.ok("migrate", NAME, "lab-b")
    is_only_on(made, "lab-b")
    made.ok("checkpoint", "restore", "point", "--in-place")
    is_only_on(made, "lab-b")
    made.ok("checkpoint", "rm", "point", "--yes")


@pytest.mark.long
def test_keep_protects_it_again_wherever_it_is(guest: Machines) -> None:
    made = guest
    words = ("replicate", "keep", NAME, "lab-a", "lab-b", "--lease", str(leases(made)))
    keeper = made.begin(*words)
    try:
        for pair in (HOSTS, HOSTS[::-1]):
            _fails_over_when_protected(made, *pair)
    finally:
        keeper.kill()
        keeper.communicate()
    made.ok("replicate", "stop", NAME)
    is_only_on(made, "lab-a")


def _fails_over_when_protected(made: Machines, primary: str, standby: str) -> None:
    eventually(lambda: _protects(made, primary, standby), 120, f"{standby} to protect it")
    (qemu,) = qemus(made, primary)
    kill(qemu)
    eventually(lambda: _running(made) == {standby}, 60, f"{standby} to take over")


def _protects(made: Machines, primary: str, standby: str) -> bool:
    done = made.vmckpt("replicate", "status", NAME)
    sides = done.result.get("sides", [])
    return any(
        (one["primary"], one["standby"], one["state"]) == (primary, standby, "protected")
        for one in sides
    )


@pytest.mark.long
def test_a_device_that_is_plugged_in_ends_the_protection(guest: Machines) -> None:
    made = guest
    protect(made)
    made.virsh("lab-a", "attach-interface", NAME, "bridge", "br0", "--model", "virtio", "--live")
    eventually(lambda: sides(made)["lab-a"]["state"] == "ended", 60, "the protection to end")
    # What is noticed first: its ROM, or itself.
    assert re.search("memory has changed|net1", sides(made)["lab-a"]["why"])
    is_only_on(made, "lab-a")
    protect(made)  # with that device
    made.ok("replicate", "failover", NAME)
    is_only_on(made, "lab-b")


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("snapshot-create-as", "first"), "[snapshots] libvirt has snapshots of it: first"),
    ],
)
def test_what_cannot_be_replicated_is_refused_by_name(
    guest: Machines, words: tuple[str, ...], reason: str
) -> None:
    made = guest
    made.virsh("lab-a", words[0], NAME, *words[1:])
    done = made.vmckpt("replicate", "start", NAME, "lab-b", "--lease", str(leases(made)))
    assert done.code == 4
    assert reason in re.sub(r"\s+", " ", done.stderr)
    is_only_on(made, "lab-a")
    is_clean(made)
