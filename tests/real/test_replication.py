"""Replication between hosts that look like machines: leases in etcd, agents over SSH, and back."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.counting import Counting
from tests.etcd_cluster import Cluster, running
from tests.qemu.world import image
from tests.real.machines import Machines
from tests.waiting import eventually
from vmckpt.hosts.processes.process import find_by_argument, identify
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.network import set_link
from vmckpt.lab.processes import find
from vmckpt.lab.real.management import set_operator_link

NAME = "web"
BY_KILL = f"{sys.prefix}/bin/vmckpt-fence-by-kill"


@pytest.fixture
def cluster(real_lab: Machines, tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path, address=real_lab.operator_address()) as made:
        yield made


@contextmanager
def a_guest(made: Machines) -> Iterator[LabGuest]:
    """On lab-a; nothing of it stays."""
    guest = LabGuest(NAME, 1, image(), memory="96M", disk=None)
    made.run_guest(guest, "lab-a")
    try:
        asyncio.run(_ready(made, guest))
        yield guest
    finally:
        made.vmckpt("replicate", "stop", NAME)
        made.vmckpt("vm", "stop", NAME, "--force")
        made.vmckpt("vm", "rm", NAME)
        for left in made.shared.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()


async def _ready(made: Machines, guest: LabGuest) -> None:
    control = await guest.control(made.lab)
    await control.close()


def agent(made: Machines) -> str:
    """By which a host reaches another's root: the operator's key, where both read it."""
    keys = made.lab.directory / "ssh"
    for name in ("id", "known_hosts", "config"):
        text = (keys / name).read_text().replace(str(keys), str(made.shared))
        (made.shared / name).write_text(text)
        (made.shared / name).chmod(0o600)
    return f"{BY_KILL} ssh -F {made.shared}/config {{host}}"


def services(made: Machines, role: str) -> list[int]:
    ours = {process.pid for process in find(made.lab.directory)}
    found = find_by_argument(f"replica\0{role}\0/var/lib/vmckpt/replicas/{NAME}")
    return [process.pid for process in found if process.pid in ours]


def qemus(made: Machines, host: str) -> list[int]:
    """Those of one host."""
    root = made.here(host, Path("/"))
    return [one.pid for one in made.qemus(NAME) if Path(f"/proc/{one.pid}/root").samefile(root)]


def sides(made: Machines) -> dict[str, dict[str, Any]]:
    return {side["role"]: side for side in made.ok("replicate", "status", NAME)["sides"]}


def is_promoted(made: Machines) -> bool:
    return bool(sides(made).get("standby", {}).get("state") == "promoted")


def homes(made: Machines) -> list[tuple[str, str]]:
    return [(vm["host"], vm["state"]) for vm in made.ok("vm", "list")["vms"]]


def events(made: Machines) -> list[tuple[str, str, str]]:
    """What was told, by host: state and ending."""
    command = made.begin("replicate", "events", NAME)
    out, _ = command.communicate(timeout=60)
    told = [json.loads(line) for line in out.splitlines()]
    return [(one["host"], one["state"], one.get("ending", "")) for one in told]


def test_what_a_failover_needs_is_tried_at_the_start(real_lab: Machines) -> None:
    with a_guest(real_lab):
        apart = "/var/lib/vmckpt/leases"  # each host has its own
        failed = real_lab.vmckpt("replicate", "start", NAME, "lab-b", "--lease", apart)
        assert failed.code == 7
        assert "standby and primary read different leases" in failed.error["why"]
        shared = ["--lease", str(real_lab.shared)]
        failed = real_lab.vmckpt(
            "replicate", "start", NAME, "lab-b", *shared, "--fence", "/bin/false {host}"
        )
        assert "fencing agent /bin/false failed to check lab-a" in failed.error["why"]
        assert homes(real_lab) == [("lab-a", "running")]
        assert not services(real_lab, "primary") + services(real_lab, "standby")
        assert len(real_lab.qemus(NAME)) == 1


@pytest.mark.timeout(300)
def test_a_primary_that_stands_still_is_fenced_and_the_guest_comes_back(
    real_lab: Machines, cluster: Cluster
) -> None:
    lease = ["--lease", f"etcd:{','.join(cluster.urls)}", "--fence", agent(real_lab)]
    with a_guest(real_lab) as guest:
        real_lab.ok("replicate", "start", NAME, "lab-b", *lease)
        frozen = [*services(real_lab, "primary"), *qemus(real_lab, "lab-a")]
        with cluster.without(cluster.leader()):
            os.kill(frozen[0], signal.SIGSTOP)
            eventually(lambda: is_promoted(real_lab), 60, "lab-b goes on")
        assert [identify(pid) for pid in frozen] == [None, None]
        asyncio.run(_ready(real_lab, guest))
        back = real_lab.ok("replicate", "failback", NAME)
        assert (back["standby"], back["state"]) == ("lab-a", "promoted")
        assert 0 < back["guest_downtime_ms"] < 20_000
        assert homes(real_lab) == [("lab-a", "running")]
        told = events(real_lab)
        assert ("lab-b", "promoted", "") in told
        assert ("lab-b", "ended", "yours") in told
        assert ("lab-a", "promoted", "") in told


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_without_a_majority_nobody_takes_over_and_the_guest_stands_still(
    real_lab: Machines, cluster: Cluster, how: str
) -> None:
    harmed = cluster.without if how == "killed" else cluster.stopped
    with a_guest(real_lab) as guest:
        lease = ["--lease", f"etcd:{','.join(cluster.urls)}"]
        real_lab.ok("replicate", "start", NAME, "lab-b", *lease)
        asyncio.run(_lose_members(real_lab, guest, cluster, harmed))


async def _lose_members(made: Machines, guest: LabGuest, cluster: Cluster, harmed: Any) -> None:
    async with counted(made, guest) as counting:
        with harmed(cluster.leader()):
            await counting.more_than(counting.answers + 20)
            assert sides(made)["primary"]["state"] == "protected"
        with harmed(*cluster.members[1:]):
            await until(lambda: not sides(made)["primary"]["may_run"], "the guest stands still")
            await until(lambda: homes(made) == [("lab-a", "paused")], "the guest stands still")
            before = counting.answers
            await asyncio.sleep(2.0)
            assert counting.answers == before
            assert sides(made)["standby"]["state"] == "following"
        await until(lambda: sides(made)["primary"]["may_run"], "it goes on")
        await until(lambda: homes(made) == [("lab-a", "running")], "it goes on")
        await counting.more_than(before + 20)
        with harmed(*cluster.members[1:]):
            for pid in [*services(made, "primary"), *qemus(made, "lab-a")]:
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(8.0)  # longer than a lease, and than anybody's patience
            assert not is_promoted(made)
        await until(lambda: is_promoted(made), "lab-b goes on, now that it may")
        assert made.ok("vm", "show", NAME)["host"] == "lab-b"  # and what lab-a has goes
        assert homes(made) == [("lab-b", "running")]
        await counting.more_than(counting.answers + 20)


@asynccontextmanager
async def counted(made: Machines, guest: LabGuest) -> AsyncIterator[Counting]:
    """A client that counts for the block, over one connection; every answer is the right one."""
    counting = Counting(await guest.key_value(made.lab))
    try:
        yield counting
    finally:
        await counting.end()


async def until(true: Callable[[], bool], what: str) -> None:
    """While the client counts on."""
    await asyncio.to_thread(eventually, true, 60, what)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cut_off", ["lab-a", "lab-b"])
def test_a_side_that_is_cut_off_from_the_arbiter_does_not_have_the_guest(
    real_lab: Machines, cluster: Cluster, cut_off: str
) -> None:
    with a_guest(real_lab) as guest:
        lease = ["--lease", f"etcd:{','.join(cluster.urls)}"]
        real_lab.ok("replicate", "start", NAME, "lab-b", *lease)
        asyncio.run(_cut_off(real_lab, guest, cluster, cut_off))


async def _cut_off(made: Machines, guest: LabGuest, cluster: Cluster, which: str) -> None:
    async with counted(made, guest) as counting:
        await counting.more_than(counting.answers + 20)
        with unreachable(made, which, cluster):
            if which == "lab-a":  # its lease ends, and it is heard all the same
                await until(lambda: is_promoted(made), "lab-b goes on")
            else:
                await asyncio.sleep(6.0)
                assert sides(made)["primary"]["state"] == "protected"
                for pid in [*services(made, "primary"), *qemus(made, "lab-a")]:
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(8.0)
                assert not is_promoted(made)
        await until(lambda: is_promoted(made), "lab-b goes on")
        assert made.ok("vm", "show", NAME)["host"] == "lab-b"  # and what lab-a has goes
        await until(lambda: homes(made) == [("lab-b", "running")], "one guest, on lab-b")
        await counting.more_than(counting.answers + 20)


@contextmanager
def unreachable(made: Machines, host: str, cluster: Cluster) -> Iterator[None]:
    """For the block a host sends nothing to etcd."""
    address = made.operator_address()
    rules = [
        ["to", address, "ipproto", "tcp", "dport", str(member.port), "type", "blackhole"]
        for member in cluster.members
    ]
    try:
        for rule in rules:
            said = made.inside(host, "ip", "rule", "add", *rule)
            assert said.code == 0, said.stderr
        yield
    finally:
        for rule in rules:
            made.inside(host, "ip", "rule", "del", *rule)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_primary_that_nobody_hears_any_more_is_replaced_when_its_lease_has_ended(
    real_lab: Machines, cluster: Cluster
) -> None:
    """Its second address is the operator's network, where etcd is: both cables are pulled."""
    with a_guest(real_lab) as guest:
        lease = ["--lease", f"etcd:{','.join(cluster.urls)}"]
        begun = real_lab.ok("replicate", "start", NAME, "lab-b", *lease)
        assert begun["paths"] == {"replication": "heard", "second": "heard"}
        asyncio.run(_isolate(real_lab, guest))


async def _isolate(made: Machines, guest: LabGuest) -> None:
    async with counted(made, guest) as counting:
        await counting.more_than(counting.answers + 20)
        await set_link(made.lab, "lab-a", up=False)
        await set_operator_link(made.lab, up=False, host="lab-a")
        try:
            await until(lambda: is_promoted(made), "lab-b goes on")
            await counting.more_than(counting.answers + 20)
        finally:
            await set_operator_link(made.lab, up=True, host="lab-a")
            await set_link(made.lab, "lab-a", up=True)
        assert made.ok("vm", "show", NAME)["host"] == "lab-b"  # and what lab-a has goes
        await until(lambda: homes(made) == [("lab-b", "running")], "one guest, on lab-b")
        await counting.more_than(counting.answers + 20)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_an_agent_that_proves_nothing_is_waited_out(real_lab: Machines, how: str) -> None:
    path = real_lab.shared / "agent"
    with a_guest(real_lab):
        late = "sleep 100" if how == "hangs" else "exit 1"
        path.write_text(f'#!/bin/sh\n[ "$1" = check ] && echo fine && exit 0\n{late}\n')
        path.chmod(0o755)
        lease = ["--lease", str(real_lab.shared), "--fence", str(path)]
        real_lab.ok("replicate", "start", NAME, "lab-b", *lease)
        (primary,) = services(real_lab, "primary")
        os.kill(primary, signal.SIGSTOP)
        try:
            # The guard has stopped the guest by then: its lease has ended.
            eventually(lambda: is_promoted(real_lab), 60, "lab-b goes on after the lease")
        finally:
            os.kill(primary, signal.SIGCONT)
        assert real_lab.ok("vm", "show", NAME)["host"] == "lab-b"  # and what lab-a has goes
        assert homes(real_lab) == [("lab-b", "running")]
        eventually(lambda: len(real_lab.qemus(NAME)) == 1, 20, "one QEMU")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_vm_is_kept_protected_whatever_ends_it(real_lab: Machines) -> None:
    with a_guest(real_lab):
        words = ("keep", NAME, "lab-a", "lab-b", "--lease", str(real_lab.shared))
        keeper = real_lab.begin("replicate", *words)
        try:
            eventually(lambda: is_protected_by(real_lab, "lab-b"), 60, "it is protected")
            for pid in services(real_lab, "standby"):
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: not is_protected_by(real_lab, "lab-b"), 60, "the standby is lost")
            eventually(lambda: is_protected_by(real_lab, "lab-b"), 90, "it is protected again")
            real_lab.ok("replicate", "failover", NAME)
            eventually(lambda: is_protected_by(real_lab, "lab-a"), 90, "by the old host")
        finally:
            keeper.send_signal(signal.SIGTERM)
            out, said = keeper.communicate(timeout=60)
            print(out, said)  # pytest shows it when the test failed
        assert is_protected_by(real_lab, "lab-a")  # without its keeper
        assert "Traceback" not in said


def is_protected_by(made: Machines, standby: str) -> bool:
    done = made.vmckpt("replicate", "status", NAME)
    told = [side for side in done.result.get("sides", []) if side["role"] == "primary"]
    return any(
        one["answers"] and one["state"] == "protected" and one["standby"] == standby for one in told
    )
