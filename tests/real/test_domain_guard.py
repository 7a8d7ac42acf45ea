"""Guards of libvirt's domains: kept, put back, ended by a kill; and nothing left in libvirt."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.world import COMMAND, Done
from tests.real.domains import GUEST, OWN_DISK, VIRT_INSTALL, states
from tests.real.machines import Machines
from tests.real.test_domain_checkpoints import booted, domain, load, nothing_left, sound, take
from tests.waiting import eventually

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(600)]
KEPT, REFUSED, ROLLED_BACK = 0, 4, 7


@pytest.fixture(scope="module")
def guarded(secured: Machines) -> Iterator[Machines]:
    """A domain with the devices that virt-install gives it, under load."""
    for made in domain(secured, VIRT_INSTALL):
        asyncio.run(_loaded(made))
        yield made
        for point in points(made):
            made.ok("checkpoint", "unpin", point, "--force")


async def _loaded(made: Machines) -> None:
    await booted(made)
    await (await load(made)).close()


def begin(made: Machines, *words: str) -> "subprocess.Popen[str]":
    """A guard in a process; what `Machines.begin` adds would be the guarded command's."""
    return subprocess.Popen(
        [*COMMAND, "guard", GUEST.name, "--json", "--every", "1s", *words],
        env=made.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def guard(made: Machines, *words: str) -> Done:
    command = begin(made, *words)
    out, err = command.communicate(timeout=240)
    assert "Traceback" not in err, err
    return Done(command.returncode, json.loads(out), err)


def only_it(made: Machines) -> None:
    """The domain runs, and is sound; the copy that proved its checkpoint is gone with its image."""
    asyncio.run(sound(made))
    nothing_left(made)
    assert made.virsh("lab-a", "list", "--all", "--name").split() == [GUEST.name]
    images = made.inside("lab-a", "ls", str(OWN_DISK.parent)).stdout.split()
    assert images == [OWN_DISK.name]


def phases(made: Machines) -> list[str]:
    return [one["phase"] for one in made.ok("guard", "list")["guards"]]


def points(made: Machines) -> list[str]:
    return [one["id"] for one in made.ok("checkpoint", "list", GUEST.name)["checkpoints"]]


def test_what_goes_well_is_kept_and_can_be_undone(guarded: Machines, tmp_path: Path) -> None:
    made, mark = guarded, tmp_path / "ran"
    done = guard(made, "--check", "agent", "--for", "2s", "--", "touch", str(mark))
    assert done.code == KEPT, done
    assert mark.exists()
    assert "a copy of it runs" in done.stderr
    only_it(made)
    assert phases(made) == ["kept"]
    (point,) = points(made)
    assert made.vmckpt("guard", "rollback", GUEST.name).code == 0
    only_it(made)
    assert take(made, "since")["parent"] == point  # it was put back to that
    made.ok("checkpoint", "rm", "since", "--yes")


@pytest.mark.parametrize("where", ["here", "host", pytest.param("guest", marks=pytest.mark.long)])
def test_a_command_that_fails_is_undone(guarded: Machines, where: str) -> None:
    words = ["/bin/busybox", "false"] if where == "guest" else ["sh", "-c", "echo oops; exit 3"]
    done = guard(guarded, "--in", where, "--", *words)
    assert done.code == ROLLED_BACK, done
    assert "oops" in done.stderr or where == "guest"
    only_it(guarded)


def test_a_domain_that_the_command_stops_is_brought_back(guarded: Machines) -> None:
    """It is off, as after an upgrade that does not boot: its checks fail."""
    virsh = f"virsh -c qemu:///system destroy {GUEST.name}"
    done = guard(guarded, "--in", "host", "--failures", "2", "--", "sh", "-c", virsh)
    assert done.code == ROLLED_BACK, done
    assert "it is stopped" in done.stderr
    only_it(guarded)


def test_a_guard_that_is_killed_ends_its_command_and_puts_the_domain_back(
    guarded: Machines, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    words = ["sh", "-c", f"echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 600"]
    with begin(guarded, "--", *words) as begun:
        eventually(pid.exists, 120, "the command to run")
        os.kill(begun.pid, signal.SIGKILL)
    command = int(pid.read_text())
    eventually(lambda: not Path(f"/proc/{command}").exists(), 60, "the command to end")
    eventually(lambda: phases(guarded)[-1] == "rolled_back", 180, "its recovery")
    only_it(guarded)


def test_one_that_is_killed_before_its_command_leaves_nothing(guarded: Machines) -> None:
    """While the copy runs that proves its checkpoint: the copy goes, and the checkpoint."""
    before, known = points(guarded), len(phases(guarded))
    names = ("virsh", "--connect", "qemu:///system", "list", "--all", "--name")
    with begin(guarded, "--", "true") as begun:
        eventually(lambda: "proof-" in guarded.inside("lab-a", *names).stdout, 120, "the copy")
        os.kill(begun.pid, signal.SIGKILL)
    eventually(lambda: len(phases(guarded)) == known, 180, "its recovery")
    only_it(guarded)
    assert points(guarded) == before


def test_one_that_could_not_be_put_back_is_not_guarded(guarded: Machines, tmp_path: Path) -> None:
    """Its snapshots would be lost; and nothing is run."""
    mark = tmp_path / "ran"
    guarded.virsh("lab-a", "snapshot-create-as", GUEST.name, "old")
    try:
        done = guard(guarded, "--", "touch", str(mark))
        assert (done.code, mark.exists()) == (REFUSED, False), done
        assert "could not be rolled back" in done.error["what"]
        assert "which would be lost" in done.error["why"]
    finally:
        guarded.virsh("lab-a", "snapshot-delete", GUEST.name, "old")
    assert states(guarded) == {"lab-a": "running"}
    only_it(guarded)
